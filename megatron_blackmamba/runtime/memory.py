"""Memory of a process without a GPU: the next step reuses what a step frees.

By default glibc gives every large block back to the kernel, which must find and clear each page again at the next step.
A training step asks for the same blocks every time, so they are kept, in huge pages where the kernel lends them.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_LARGEST = 2**31 - 1
_GROW_BY = 64 << 20


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on; return False if the C library has no such option."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it at its first tensor, so call this early
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    choices = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, _GROW_BY))
    return all(mallopt(name, value) == 1 for name, value in choices)
