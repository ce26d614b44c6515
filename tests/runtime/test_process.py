"""Settings of a whole process."""

import atexit
import gc
import weakref

from megatron_blackmamba.runtime import process


class Node:
    """An object that only the garbage collector can free."""

    def __init__(self):
        self.itself = self


def test_garbage_is_freed_before_the_rest_is_frozen():
    gone = weakref.ref(Node())
    try:
        process.freeze_gc()
        assert gone() is None and gc.get_freeze_count() > 0
    finally:
        atexit.unregister(gc.unfreeze)
        gc.unfreeze()
