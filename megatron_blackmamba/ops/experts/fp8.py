"""The products of all experts at once in FP8; taken only where it is asked for."""

from torch import Tensor

from megatron_blackmamba.ops import fp8
from megatron_blackmamba.ops.experts.grouped_mm import ends_of


def unavailable() -> str | None:
    return fp8.why_not()


def grouped_linear(x_TD: Tensor, tokens_per_expert_E: Tensor, weight_EOD: Tensor, ends_E: Tensor | None) -> Tensor:
    return fp8.fp8_grouped_linear(x_TD, ends_of(tokens_per_expert_E, x_TD, ends_E), weight_EOD)
