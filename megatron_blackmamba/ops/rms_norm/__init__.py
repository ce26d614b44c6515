"""RMS norm over the last dimension, of fp32 inputs: one kernel of C++ or Triton where it applies, else PyTorch's.

Shapes: D channels.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_floats, require_shape

BACKENDS = ("triton", "cpp", "reference")  # best first, each where it applies


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight, computed in fp32 (float64 if x is), in the weight's dtype."""
    require_floats("rms_norm", x=x, weight=weight_D)
    require_shape("rms_norm", "weight", weight_D, x.shape[-1])
    return backends.choose(__name__, BACKENDS, backend, x, weight_D).rms_norm(x, weight_D, eps)


def norm_and_stream(
    x: Tensor, weight_D: Tensor, eps: float, branch: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + branch, and this sum to go on with. One kernel does both where it can, each way.

    dtype: Of the norm; by default the weight's.
    """
    require_floats("rms_norm", x=x, weight=weight_D, branch=branch)
    require_shape("rms_norm", "weight", weight_D, x.shape[-1])
    require_shape("rms_norm", "branch", branch, *x.shape)
    if triton := backends.find(__name__, "triton", x, weight_D, branch):
        return triton.norm_and_stream(x, weight_D, eps, branch, dtype)
    stream = x if branch is None else x + branch
    return rms_norm(stream, weight_D, eps).to(dtype or weight_D.dtype), stream
