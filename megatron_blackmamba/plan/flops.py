"""Floating-point operations of one token, part by part: this model's exactly, and the paper's formulas for comparison.

A multiplication, an addition and an exponential count as one each. Norms, activation functions and the router's choice
are left out: together below 0.1%. The backward pass costs twice the forward.

D model, I inner, N state, R rank of dt, K convolution width, E experts.
"""

from dataclasses import dataclass

from megatron_blackmamba.config import ModelConfig, RunConfig

BACKWARD = 2
PAPER = {"BlackMamba 340M/1.5B": 6.4e20, "BlackMamba 630M/2.8B": 1.2e21, "Mamba 343M": 8.0e20}
"""Training FLOPs in the paper's table of results."""


@dataclass(frozen=True)
class PaperFormula:
    """Appendix B for a forward pass, per token: as printed, and repaired."""

    printed: float
    """One formula a block: all experts computed, the Mamba block's projections and convolution missing, no head."""
    repaired: float
    """One expert; projections and convolution as the appendix's own text has them; the head."""


def forward_by_part(model: ModelConfig, sequence: int) -> dict[str, int]:
    """Of the whole model, forward, per token of a sequence of this length."""
    D, I, N, R, K = model.hidden_size, model.inner_size, model.state_size, model.dt_rank_or_default, model.conv_kernel
    mamba, experts, attention, mlp = (model.pattern.count(letter) for letter in "ME*-")
    heads, kv_heads = model.attention.heads, model.attention.kv_heads or model.attention.heads
    key_values = D * kv_heads // heads
    parts = {
        "mamba_projections": mamba * 2 * (2 * D * I + I * (R + 2 * N) + R * I + I * D),
        "convolution": mamba * 2 * K * I,
        "scan": mamba * I * (7 * N + 4),
        "router": experts * 2 * D * model.experts,
        "experts": experts * model.top_k * 6 * D * (model.expert_hidden_size or 0),
        "attention_projections": attention * 2 * D * (2 * D + 2 * key_values),
        "attention_scores": attention * 4 * D * (sequence + 1) // 2,
        "mlp": mlp * 6 * D * (model.mlp_hidden_size or 0),
        "head": 2 * D * model.vocab_size,
    }
    return {name: count for name, count in parts.items() if count}


def forward(model: ModelConfig, sequence: int) -> int:
    """Per token, forward."""
    return sum(forward_by_part(model, sequence).values())


def training(model: ModelConfig, sequence: int) -> int:
    """Per token, forward and backward; what recomputation adds is not counted as useful."""
    return (1 + BACKWARD) * forward(model, sequence)


def recomputed(config: RunConfig) -> int:
    """Per token, what `training.recompute` does a second time."""
    parts = forward_by_part(config.model, config.data.sequence_length)
    kept = {"none": set(parts), "experts": set(parts) - {"router", "experts"}, "layers": {"head"}}
    return sum(count for name, count in parts.items() if name not in kept[config.training.recompute])


def paper_formula(model: ModelConfig, tokens_per_step: int) -> PaperFormula | None:
    """The paper's own count of this model; None for layers it has no formula for."""
    if set(model.pattern) - set("ME"):
        return None
    D, I, N, R, K = model.hidden_size, model.inner_size, model.state_size, model.dt_rank_or_default, model.conv_kernel
    E, mamba, experts = model.experts, model.pattern.count("M"), model.pattern.count("E")
    state_space = I * (11 * N + 4 * R + 1) + I * N / tokens_per_step
    printed = mamba * state_space + experts * D * E * (16 * D + 2)
    repaired = (
        mamba * (6 * I * D + 2 * I * K + state_space) + experts * (16 * D * D + 2 * D * E) + 2 * D * model.vocab_size
    )
    return PaperFormula(printed, repaired)


def published(config: RunConfig) -> float | None:
    """Training FLOPs that the paper gives for this model on 300B tokens; None for a model that is not the paper's."""
    shapes = {
        (1152, "ME" * 15, 3072): "BlackMamba 340M/1.5B",
        (1472, "ME" * 18, 3872): "BlackMamba 630M/2.8B",
        (1152, "M" * 34, None): "Mamba 343M",
    }
    model = config.model
    name = shapes.get((model.hidden_size, model.pattern, model.expert_hidden_size))
    return PAPER[name] if name and config.training.tokens == 300_000_000_000 else None
