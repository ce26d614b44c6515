"""Process-wide settings: CUDA, deterministic kernels, and garbage collection."""

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def prepare_cuda() -> None:
    """Set what CUDA and PyTorch's allocator read at their first use. Values that are already set stay."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels start in the order of their launch
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # the name since PyTorch 2.9, which reads both
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # less memory lost between blocks


def be_deterministic(wanted: bool) -> None:
    """Choose deterministic kernels, if wanted."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@contextmanager
def default_float32() -> Iterator[None]:
    """Make fp32 torch's default dtype meanwhile: numbers of a model must not depend on what a caller set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def freeze_gc() -> None:
    """Exclude what exists now from garbage collection: it stays until the end, and looking through it takes time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 10)  # Python's default: from here on little is left to look through
    atexit.register(gc.unfreeze)  # or extensions that count what they leave behind would complain
