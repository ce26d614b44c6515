"""The cross entropy of each token over a whole vocabulary: it keeps the logits, and their gradient takes their place.

On GPUs the head computes the losses (`head_loss.py`) with the Triton kernel.

Shapes: T tokens, V vocabulary.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_floats, require_shape

BACKENDS = ("triton", "cpp")  # best first; the model does without where there is none


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS) | {"pytorch": None}


def why_not(logits: Tensor) -> str | None:
    """Return why the kernel does not take the logits; None: it does."""
    return backends.refusal(__name__, "cpp", logits)


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the fp32 loss of each token. The backward pass overwrites the logits: nobody may need them after it."""
    return cross_entropy_and_log_sum(logits_TV, labels_T)[0]


def cross_entropy_and_log_sum(logits_TV: Tensor, labels_T: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the fp32 loss of each token as `cross_entropy` does, and the logarithm of its sum of exponentials.

    The gradient of a loss is that of loss + z_loss * log_sum². The second result has no gradient.
    """
    require_floats("cross_entropy", logits=logits_TV)
    require_dimensions("cross_entropy", "logits", logits_TV, 2)
    require_shape("cross_entropy", "labels", labels_T, len(logits_TV))
    if labels_T.dtype != torch.int64:
        raise ValueError(f"cross_entropy: labels are {labels_T.dtype}. Pass int64.")
    cpp = backends.choose(__name__, BACKENDS, "cpp", logits_TV)
    return cpp.cross_entropy_and_log_sum(logits_TV, labels_T, z_loss)
