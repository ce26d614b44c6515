"""Floating-point operations of one token, part by part: this model's exactly, and the paper's formulas for comparison.

A multiplication, an addition and an exponential count as one each. Norms, activation functions and the router's choice
are left out: together below 0.1%. The backward pass costs twice the forward. Each kind of layer counts its own
(`kinds`).
"""

from collections import Counter
from dataclasses import dataclass

from megatron_blackmamba.config import ModelConfig, RunConfig
from megatron_blackmamba.layers import layers_of

BACKWARD = 2
HEAD = "head"
PAPER = {(1152, 15, 15, 3072): 6.4e20, (1472, 18, 18, 3872): 1.2e21, (1152, 34, 0, None): 8.0e20}
"""Training FLOPs in the paper's table of results: BlackMamba 340M/1.5B, BlackMamba 630M/2.8B and Mamba 343M.

A key is the hidden size, the number of Mamba layers, the number of expert layers and the experts' hidden size.
"""


@dataclass(frozen=True)
class PaperFormula:
    """Appendix B for a forward pass, per token: as printed, and repaired."""

    printed: float
    """One formula a block: all experts computed, the Mamba block's projections and convolution missing, no head."""
    repaired: float
    """One expert; projections and convolution as the appendix's own text has them; the head."""


def forward_by_part(model: ModelConfig, sequence: int) -> dict[str, int]:
    """Return the forward FLOPs per token of the whole model, by part, for this sequence length."""
    parts: Counter[str] = Counter()
    for kind in layers_of(model.pattern):
        parts.update(kind.costs.flops(model, sequence))
    return {**parts, HEAD: 2 * model.hidden_size * model.vocab_size}


def forward(model: ModelConfig, sequence: int) -> int:
    """Return the forward FLOPs per token."""
    return sum(forward_by_part(model, sequence).values())


def extra_depth(model: ModelConfig, sequence: int) -> int:
    """Return the forward FLOPs per token that multi-token prediction adds in training: layers, projection and head."""
    if not model.mtp.pattern:
        return 0
    layers = sum(sum(kind.costs.flops(model, sequence).values()) for kind in layers_of(model.mtp.pattern))
    return layers + 4 * model.hidden_size**2 + 2 * model.hidden_size * model.vocab_size


def training(model: ModelConfig, sequence: int) -> int:
    """Return the forward and backward FLOPs per token, without recomputation."""
    return (1 + BACKWARD) * (forward(model, sequence) + extra_depth(model, sequence))


def recomputed(config: RunConfig) -> int:
    """Return the FLOPs per token that `training.recompute` repeats."""
    model, sequence = config.model, config.data.sequence_length
    again = [kind for kind in layers_of(model.trained_pattern) if config.training.recompute in kind.recompute]
    return sum(sum(kind.costs.flops(model, sequence).values()) for kind in again)


def paper_formula(model: ModelConfig, tokens_per_step: int) -> PaperFormula | None:
    """Return the paper's own FLOP count of this model, or None for layers without a formula."""
    printed, repaired = 0.0, 2.0 * model.hidden_size * model.vocab_size
    for kind in layers_of(model.pattern):
        formula = kind.costs.paper_flops(model, tokens_per_step)
        if formula is None:
            return None
        printed, repaired = printed + formula[0], repaired + formula[1]
    return PaperFormula(printed, repaired)


def published(config: RunConfig) -> float | None:
    """Return the paper's training FLOPs of this model for 300B tokens, or None for other models."""
    model, formula = config.model, paper_formula(config.model, config.tokens_per_step)
    routed = sum(kind.routed for kind in layers_of(model.pattern))
    shape = (model.hidden_size, model.layers - routed, routed, model.expert_hidden_size)
    return PAPER.get(shape) if formula and config.training.tokens == 300_000_000_000 else None
