"""Check whether the Triton backends can run on this machine."""

import os

import torch
import triton

OLDEST = (3, 6)  # ships with torch 2.11; earlier versions lack features that the kernels use


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on CPU tensors, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or newer, found {triton.__version__}"
    return None if torch.cuda.is_available() or interpreted() else "needs a CUDA device"


GRID = 65_535  # programs along a launch's second and third axis, for CUDA


def too_long(batch: int, length: int, tile: int) -> str | None:
    """Return why a launch over sequences and tiles of tokens is impossible, or None."""
    if batch > GRID:
        return f"at most {GRID:,} sequences at once, not {batch:,}"
    return f"at most {GRID * tile:,} tokens a sequence, not {length:,}" if length > GRID * tile else None
