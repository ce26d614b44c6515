"""Gated activations: activation(gate) * up, times a weight for each token; one kernel of C++ or Triton each way.

`activated` also takes what no kernel computes: relu2, and activations without a gate.

Shapes: T tokens, F hidden units, G = 2F gate and up, gate first.
"""

from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_floats, require_shape
from megatron_blackmamba.ops.gated.reference import ACTIVATIONS, GATED, activated

BACKENDS = ("triton", "cpp", "reference")  # best first, each where it applies


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def is_fused(gate_up_TG: Tensor, activation: str) -> bool:
    """Return whether one kernel does it all, so that weights of tokens cost nothing."""
    return activation in GATED and any(backends.find(__name__, name, gate_up_TG) for name in ("triton", "cpp"))


def gated(gate_up_TG: Tensor, activation: str, weights_T: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Return `[T, F]` in the dtype of gate and up."""
    if activation not in GATED:
        raise ValueError(f"gated: activation must be one of {', '.join(GATED)}, not {activation!r}")
    require_floats("gated", gate_up=gate_up_TG, weights=weights_T)
    require_dimensions("gated", "gate_up", gate_up_TG, 2)
    require_shape("gated", "weights", weights_T, len(gate_up_TG))
    if gate_up_TG.shape[1] % 2:
        raise ValueError(f"gated: gate and up have {gate_up_TG.shape[1]} columns together. Pass an even number.")
    return backends.choose(__name__, BACKENDS, backend, gate_up_TG).gated(gate_up_TG, activation, weights_T)
