"""Check whether the Triton backends can run on this machine."""

import torch
import triton
import triton.language as tl

from megatron_blackmamba.ops.backends import interpreted

OLDEST = (3, 4)  # all kernels are tested in the interpreter of 3.4 to 3.9; the scan does not compile with 3.3


def unavailable() -> str | None:
    if reason := older_than(OLDEST):
        return reason
    return None if torch.cuda.is_available() or interpreted() else "needs a CUDA device"


def older_than(version: tuple[int, int]) -> str | None:
    """Return that Triton is older than a version, or None."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= version:
        return None
    return f"needs Triton {'.'.join(map(str, version))} or newer, found {triton.__version__}"


@triton.jit
def _copy(x, y):
    tl.store(y, tl.load(x))


def smallest(device: str) -> None:
    """Compile and run a kernel, which needs a C compiler and a driver that fits."""
    x = torch.ones(1, dtype=torch.float32, device=device)
    y = torch.zeros_like(x)
    _copy[(1,)](x, y)
    if y.item() != 1:
        raise ArithmeticError("a copied 1 is not 1")


GRID = 65_535  # programs along a launch's second and third axis, for CUDA


def too_long(batch: int, length: int, tile: int) -> str | None:
    """Return why a launch over sequences and tiles of tokens is impossible, or None."""
    if batch > GRID:
        return f"at most {GRID:,} sequences at once, not {batch:,}"
    return f"at most {GRID * tile:,} tokens a sequence, not {length:,}" if length > GRID * tile else None
