"""Settings of a whole process."""

import atexit
import gc
import os
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


def test_cuda_settings_leave_given_values(monkeypatch):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    process.prepare_cuda()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")  # the newer name of the same setting
    process.prepare_cuda()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
