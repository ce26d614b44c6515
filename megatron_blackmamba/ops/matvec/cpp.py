"""Vectors times a large matrix in C++ (csrc/matvec.cpp), summed in fp32.

Shapes: B vectors, I in, O out.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes

TAKES = Takes("cpu", FP32_OR_BF16)
MAX_VECTORS = 64  # at once, as in csrc/dots.h
BYTES_PER_THREAD = 1 << 18  # less work than this does not pay for calling a thread


def unsupported(weight_OI: Tensor, x_BI: Tensor) -> str | None:
    if weight_OI.stride(1) != 1 or x_BI.dim() != 2 or not x_BI.shape[0]:
        return f"weight strides {weight_OI.stride()}, vectors {tuple(x_BI.shape)}"
    return None


def matvec(weight_OI: Tensor, x_BI: Tensor, threads: int | None) -> Tensor:
    x = x_BI.float().contiguous()
    y_BO = x.new_empty(x.shape[0], weight_OI.shape[0])
    most = torch.get_num_threads() if threads is None else threads
    threads = min(most, 1 + weight_OI.numel() * weight_OI.itemsize // BYTES_PER_THREAD)
    weight = library.Matrix.of(weight_OI)
    library.call("matvec", _Arguments(weight=weight, B=x.shape[0], threads=threads, x=x, y=y_BO))
    return y_BO.to(x_BI.dtype)


class _Arguments(library.Arguments):
    """struct Matvec of csrc/matvec.h."""

    _fields_ = library.fields("matrix weight; int64 B threads; pointer x y")
