"""Process-wide settings: deterministic kernels, and garbage collection."""

import atexit
import gc
import os

import torch


def be_deterministic(wanted: bool) -> None:
    """Choose deterministic kernels, if wanted."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def freeze_gc() -> None:
    """Exclude what exists now from garbage collection: it stays until the end, and looking through it takes time."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extensions that count what they leave behind would complain
