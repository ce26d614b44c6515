"""A few vectors times a large matrix, for decoding: as fast as memory delivers the matrix.

Shapes: B vectors, I in, O out.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.dtypes import require_floats

MAX_VECTORS = 8  # as in csrc/dots.h; above, a matrix product does better
BYTES_PER_THREAD = 1 << 18  # less work than this does not pay for calling a thread


class Matrix(ctypes.Structure):
    """struct Matrix of csrc/dots.h. Whoever makes one keeps its tensor alive."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "stride", "is_bf16")),
    )


def matrix(weight_OI: Tensor) -> Matrix:
    is_bf16 = weight_OI.dtype == torch.bfloat16
    return Matrix(weight_OI.data_ptr(), *weight_OI.shape, weight_OI.stride(0), is_bf16)


@torch.no_grad()
def matvec(weight_OI: Tensor, x_BI: Tensor, threads: int | None = None) -> Tensor:
    """Return y_BO = x_BI @ weight_OI.T without gradient, summed in fp32; what C++ cannot do goes to `F.linear`.

    threads: at most so many, by default as many as torch uses.
    """
    require_floats("matvec", weight=weight_OI, x=x_BI)
    if why_not_cpp(weight_OI, x_BI):
        return F.linear(x_BI.to(weight_OI.dtype), weight_OI).to(x_BI.dtype)
    y_BO = torch.empty(x_BI.shape[0], weight_OI.shape[0], dtype=torch.float32)
    most = torch.get_num_threads() if threads is None else threads
    arguments = _Arguments(weight=matrix(weight_OI), B=x_BI.shape[0])
    arguments.set(threads=min(most, 1 + weight_OI.numel() * weight_OI.itemsize // BYTES_PER_THREAD))
    arguments.set(x=x_BI.float().contiguous(), y=y_BO)
    library.call("matvec", arguments, library.isa())
    return y_BO.to(x_BI.dtype)


def why_not_cpp(weight_OI: Tensor, x_BI: Tensor) -> str | None:
    if reason := library.unavailable():
        return reason
    if weight_OI.device.type != "cpu" or weight_OI.dtype not in (torch.float32, torch.bfloat16):
        return f"{weight_OI.dtype} on {weight_OI.device.type}"
    if weight_OI.stride(1) != 1 or x_BI.dim() != 2 or not 0 < x_BI.shape[0] <= MAX_VECTORS:
        return f"weight strides {weight_OI.stride()}, vectors {tuple(x_BI.shape)}"
    return None


class _Arguments(library.Arguments):
    """struct Matvec of csrc/matvec.h."""

    _fields_ = (
        ("weight", Matrix),
        *((name, ctypes.c_int64) for name in ("B", "threads")),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )
