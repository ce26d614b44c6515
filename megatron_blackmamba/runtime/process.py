"""Process-wide settings: CUDA, deterministic kernels, and garbage collection."""

import atexit
import gc
import os

import torch

CUDA_SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # kernels start in the order of their launch, so exchanges begin on time
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # less memory is lost between blocks
}


def prepare_cuda() -> None:
    """Set what CUDA and PyTorch's allocator read at their first use. Values that are already set stay."""
    renamed = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}  # by PyTorch 2.9, which reads both
    for name, value in CUDA_SETTINGS.items():
        if renamed.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


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
