"""Adam over many tensors at once; `engine/adam.py` is the optimizer that calls it."""

import importlib
from typing import Any

from torch import Tensor

from megatron_blackmamba.ops import backends

BACKENDS = ("triton",)
FUSED_ADAM = ("transformer_engine.pytorch.optimizers", "apex.optimizers")
"""Where megatron-core looks for FusedAdam, which it prefers to this project's Adam."""


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return {"fused_adam": _why_no_fused_adam(), **backends.available(__name__, BACKENDS), "pytorch": None}


def kernel_for(weight: Tensor) -> Any:
    """Return the module of the kernel that updates such weights, or None."""
    return backends.find(__name__, "triton", weight)


def _why_no_fused_adam() -> str | None:
    reasons = []
    for name in FUSED_ADAM:
        try:
            importlib.import_module(name)
            return None
        except Exception as error:  # a package built for another torch fails in ways of its own
            reasons.append(str(error))
    return ", ".join(reasons)
