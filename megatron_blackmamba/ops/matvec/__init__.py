"""Vectors times a large matrix, without gradient: a few as fast as memory delivers the matrix, many as `product`.

Shapes: B vectors, I in, O out.
"""

import os
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_floats, require_shape
from megatron_blackmamba.ops.matvec.cpp import MAX_VECTORS

BACKENDS = ("cpp", "reference")  # best first, each where it applies


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


@torch.no_grad()
def matvec(weight_OI: Tensor, x_BI: Tensor, threads: int | None = None) -> Tensor:
    """Return y_BO = x_BI @ weight_OI.T without gradient, summed in fp32.

    Calls that the C++ kernel does not support go to `F.linear`.

    Args:
        threads: Maximum number of threads. Default: as many as torch uses.
    """
    require_floats("matvec", weight=weight_OI, x=x_BI)
    require_dimensions("matvec", "weight", weight_OI, 2)
    require_shape("matvec", "x", x_BI, *x_BI.shape[:-1], weight_OI.shape[1])
    return backends.choose(__name__, BACKENDS, "auto", weight_OI, x_BI).matvec(weight_OI, x_BI, threads)


FEW, SEVERAL = 32, 256
"""Up to so many vectors the C++ kernel is the fastest, and where PyTorch has no better: measured by the command
`python -m benchmarks.batches`, with AMX and with AVX2."""


@torch.no_grad()
def product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x @ weight_OI.T in x's dtype, the fastest way on this processor.

    Without bf16 instructions PyTorch multiplies bf16 five times slower than fp32. There the C++ kernel, which widens
    weights in registers, takes up to `SEVERAL` vectors, and for more the weight is widened first.
    """
    x_BI = x.flatten(0, -2)
    B, slow = x_BI.shape[0], weight_OI.dtype == torch.bfloat16 and not bf16_products()
    cpp = backends.find(__name__, "cpp", weight_OI, x_BI)
    if cpp and (SEVERAL if slow else FEW) >= B:
        y_BO = cpp.matvec(weight_OI, x_BI, None)
    elif slow and x.device.type == "cpu":
        y_BO = F.linear(x_BI.float(), weight_OI.float()).to(x.dtype)
    else:
        y_BO = F.linear(x_BI.to(weight_OI.dtype), weight_OI).to(x.dtype)
    return y_BO.unflatten(0, x.shape[:-1])


@cache
def bf16_products() -> bool:
    """Return whether this processor multiplies bf16 natively and PyTorch may use it."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")).upper()
    if allowed not in ("DEFAULT", "ALL") and not any(name in allowed for name in ("BF16", "FP16", "AMX", "AVX10")):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    x86 = "\nflags" in flags
    return not x86 or any(name in flags for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert"))


def why_not_cpp(weight_OI: Tensor, x_BI: Tensor) -> str | None:
    """Return why the C++ kernel does not take the call, or None."""
    return backends.refusal(__name__, "cpp", weight_OI, x_BI)
