"""Sinkhorn whose bias outlives training: `sinkhorn` in training, and its mean bias in inference.

Sinkhorn's plan chooses by the largest sum of logit and a bias of the expert, which it finds anew for each micro-batch.
Inference has no batch to balance. The paper's leaves the bias out, and about a quarter of the tokens then go to another
expert than in training. This kind keeps a moving mean of the bias, so that inference chooses nearly as training did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_blackmamba.routers.base import BIAS_METRICS, Use
from megatron_blackmamba.routers.sinkhorn import Sinkhorn

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class SinkhornBias(Sinkhorn):
    name = "sinkhorn_bias"
    balanced_by_exports = False
    module = f"{__package__}.module:SinkhornBiasRouter"
    state = ("expert_bias",)
    metrics = BIAS_METRICS

    def use(self, model: ModelConfig) -> Use:
        return replace(super().use(model), biased=True, bias_on_logits=True)
