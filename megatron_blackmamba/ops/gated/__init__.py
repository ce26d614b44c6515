"""Gated activations: activation(gate) * up, times a weight for each token; one kernel of C++ or Triton each way.

`activated` also takes what no kernel computes: relu2, and activations without a gate.

Shapes: T tokens, F hidden units, G = 2F gate and up, gate first.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops import backends, library
from megatron_blackmamba.ops.arguments import require_dimensions, require_floats, require_shape
from megatron_blackmamba.ops.gradients import first_order

why_not_cpp = library.unsupported
# SwiGLU, and GeGLU with the exact (erf) GELU.
FUSED: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


def relu2(x: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return F.relu(x).square()


ACTIVATIONS = {**FUSED, "relu2": relu2}


def activated(x: Tensor, activation: str, gate: bool = True) -> Tensor:
    """Return the activation of x; with a gate, of its first half, times the second."""
    if not gate:
        return ACTIVATIONS[activation](x)
    gate_half, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_half) * up


def available_backends() -> dict[str, str | None]:
    """Return the backends, each with None if this machine can use it, or with the reason why not."""
    return backends.fused("gated")


def is_fused(gate_up_TG: Tensor, activation: str) -> bool:
    """Return whether one kernel does it all, so that weights of tokens cost nothing."""
    if activation not in FUSED:
        return False
    return why_not_cpp(gate_up_TG) is None or backends.triton_of("gated", gate_up_TG) is not None


def gated(gate_up_TG: Tensor, activation: str, weights_T: Tensor | None = None) -> Tensor:
    """Return `[T, F]` in the dtype of gate and up."""
    if activation not in FUSED:
        raise ValueError(f"gated: activation must be one of {', '.join(FUSED)}, not {activation!r}")
    require_floats("gated", gate_up=gate_up_TG, weights=weights_T)
    require_dimensions("gated", "gate_up", gate_up_TG, 2)
    require_shape("gated", "weights", weights_T, len(gate_up_TG))
    if gate_up_TG.shape[1] % 2:
        raise ValueError(f"gated: gate and up have {gate_up_TG.shape[1]} columns together. Pass an even number.")
    if triton := backends.triton_of("gated", gate_up_TG):
        y_TF: Tensor = triton.gated(gate_up_TG, weights_T, activation == "gelu")
        return y_TF
    if why_not_cpp(gate_up_TG):
        y_TF = activated(gate_up_TG, activation)
        return y_TF if weights_T is None else (y_TF * weights_T[:, None]).to(y_TF.dtype)
    return _Gated.apply(gate_up_TG, weights_T, activation == "gelu")


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weights, gelu):
        gate_up = gate_up.contiguous()
        weights = None if weights is None else weights.float().contiguous()
        y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        library.call("gated_forward", _arguments(gate_up, weights, gelu, y=y), library.isa())
        ctx.save_for_backward(gate_up, weights)
        ctx.gelu = gelu
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad_y):
        gate_up, weights = ctx.saved_tensors
        grad_gate_up, grad_weights = torch.empty_like(gate_up), None if weights is None else torch.empty_like(weights)
        gradients = {"grad_y": grad_y.contiguous(), "grad_gate_up": grad_gate_up, "grad_weights": grad_weights}
        library.call("gated_backward", _arguments(gate_up, weights, ctx.gelu, **gradients), library.isa())
        return grad_gate_up, grad_weights, None


def _arguments(gate_up, weights, gelu, **others):
    arguments = _Arguments(T=gate_up.shape[0], F=gate_up.shape[1] // 2, gelu=gelu)
    arguments.set(is_bf16=gate_up.dtype == torch.bfloat16, threads=torch.get_num_threads())
    arguments.set(gate_up=gate_up, weights=weights, **others)
    return arguments


class _Arguments(library.Arguments):
    """struct Gated of csrc/gated.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("T", "F", "is_bf16", "gelu", "threads")),
        *((name, ctypes.c_void_p) for name in ("gate_up", "weights", "y", "grad_y", "grad_gate_up", "grad_weights")),
    )
