"""The terms in which kinds, routers and operations count bytes and work, for plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig

FP32, INT64, BOOL = 4, 8, 1
"""Bytes of a number."""


@dataclass(frozen=True)
class Sizes:
    """One micro-batch on one rank, for counting bytes."""

    model: ModelConfig
    sequence: int
    here: int
    """Tokens whose residual stream this rank holds."""
    whole: int
    """Tokens of the whole micro-batch, or of this rank's part of its sequences."""
    routed: int
    """Tokens that this rank's experts compute under equal load."""
    width: int
    """Bytes of a number in the precision of training."""
    device: str
    """cpu or cuda: their kernels keep different things."""
    tensor: int
    expert_tensor: int
    context: int = 1
    keeps_states: bool = True
    """kernels.scan_states."""
    ssd: str = "auto"
    """kernels.ssd."""
    delta: str = "auto"
    """kernels.delta."""
    clips: bool = False
    """Whether optimizer.qk_clip looks at the logits of attention."""

    @property
    def sequences(self) -> int:
        """Return the number of sequences in the micro-batch."""
        return self.whole * self.context // self.sequence

    @property
    def stream(self) -> int:
        """Return the bytes of the whole micro-batch's hidden states."""
        return self.whole * self.model.hidden_size * self.width


@dataclass(frozen=True)
class Work:
    """The load that one or several operations put on a GPU."""

    moved: float = 0.0
    """Bytes read and written."""
    flops: float = 0.0
    """FLOPs of matrix products."""
    slots: float = 0.0
    """Issue slots of single threads, where a kernel is bound by instructions."""
    launches: float = 0.0


WRITTEN_AND_READ, READ_WITH_GRADIENTS = 1.4, 2.4
"""Bytes that the elementwise kernels of a layer move per byte that it keeps, forward and backward."""
SMALL_KERNELS = (10, 25)
"""Launches forward and backward that last as long as a launch, in a layer of a few modules."""


def kept_by_norms(at: Sizes, numbers: int) -> int:
    """Return the bytes that norms in a mixer keep: fp32 inputs, and with bf16 on CPUs the normalised values too."""
    return max(at.width, FP32) * numbers * (2 if at.device == "cpu" and at.width < FP32 else 1)
