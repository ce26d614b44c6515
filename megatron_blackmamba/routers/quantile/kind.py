"""Quantile balancing: a bias for each expert that would have given the last batch equal loads.

The bias chooses but does not weigh. A token needs a bias of `cutoff - score` to reach an expert, where the cutoff is
its (K+1)-th largest sum of score and bias. The quantile K/E of these needs over a batch is the bias with which the
expert gets its share. Nothing is learned from it, and a token chooses by itself, in training too. The idea is that of
"MoE Odyssey" 6 (kexue.fm/archives/11619) and of Kimi K3's report.

Shapes: T tokens, E experts, K experts of a token, H bins of a histogram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.routers.base import BIAS_METRICS, LOGITS, RouterKind, Tokens, Use, largest

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig

BINS = 4096
RANGE = 1.0
"""Scores are between 0 and 1, so no need is further than this from the smallest or largest bias."""


class Quantile(RouterKind):
    name = "quantile"
    keys = LOGITS
    depends_on = "the token, and the scores of earlier steps"
    balances_micro_batches = False
    module = f"{__package__}.module:QuantileRouter"
    state = ("expert_bias",)
    metrics = BIAS_METRICS

    def problems(self, model: ModelConfig) -> list[str]:
        if model.top_k < model.experts:
            return []
        return [
            f"model.router.kind=quantile compares chosen experts with others: set model.experts above {model.top_k}"
        ]

    def choose(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        return largest(self.selecting(logits_TE, at), at.model.top_k)

    def use(self, model: ModelConfig) -> Use:
        return Use("sigmoid", normalized=model.top_k > 1, biased=True, scale=model.router.scale)

    def layouts(self, model: ModelConfig) -> bool:
        return True


def histogram_of_needs(scores_TE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return by expert how many tokens need which bias to reach it, `[E, H]` int64."""
    experts = len(bias_E)
    cutoff_T1 = (scores_TE + bias_E).topk(top_k + 1, -1).values[:, -1:]
    low, width = _bins(bias_E)
    place_TE = ((cutoff_T1 - scores_TE - low) / width).long().clamp_(0, BINS - 1)
    place_TE += BINS * (place_TE.new_ones(experts).cumsum(0) - 1)
    needs = place_TE.new_zeros(experts * BINS)  # bincount would wait for the device
    return needs.scatter_add_(0, place_TE.flatten(), place_TE.new_ones(place_TE.numel())).view(experts, BINS)


def balancing_bias(needs_EH: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return the quantile K/E of each expert's needs, interpolated within its bin, around a mean of zero."""
    low, width = _bins(bias_E)
    sums_EH = needs_EH.cumsum(-1).double()
    wanted_E1 = sums_EH[:, -1:] * top_k / len(bias_E)
    bin_E1 = (sums_EH < wanted_E1).sum(-1, keepdim=True).clamp_(max=BINS - 1)
    inside_E1 = needs_EH.gather(-1, bin_E1).double()
    before_E1 = sums_EH.gather(-1, bin_E1) - inside_E1
    part_E1 = (wanted_E1 - before_E1) / inside_E1.clamp(min=1)
    found_E = (low + width * (bin_E1 + part_E1)).squeeze(-1)
    return found_E - found_E.mean()


def _bins(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the first bin begins, and the width of one."""
    low, high = bias_E.double().min() - RANGE, bias_E.double().max() + RANGE
    return low, (high - low) / BINS
