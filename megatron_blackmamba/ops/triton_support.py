"""Whether the Triton backends can run here."""

import os

import torch
import triton

OLDEST = (3, 6)  # comes with torch 2.11; before, not all that the kernels use was there


def interpreted() -> bool:
    """Triton's interpreter runs kernels without a GPU, on tensors in main memory: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
        return f"needs Triton {'.'.join(map(str, OLDEST))} or newer, here is {triton.__version__}"
    return None if torch.cuda.is_available() or interpreted() else "needs a CUDA device"


GRID = 65_535  # programs along a launch's second and third axis, for CUDA


def too_long(batch: int, length: int, tile: int) -> str | None:
    """Why a launch over sequences and tiles of time cannot be made, or None."""
    if batch > GRID:
        return f"at most {GRID:,} sequences at once, not {batch:,}"
    return f"at most {GRID * tile:,} tokens a sequence, not {length:,}" if length > GRID * tile else None
