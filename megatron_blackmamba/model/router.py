"""Routers: which expert each token goes to, and by how much its output counts.

Both count the tokens each expert gets, so that the trainer can report them without asking the device anything.

Shapes: S sequence, B batch, D model, T = S * B tokens of this rank, E experts.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.sharding import empty, replicated, without_decay
from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice
from megatron_blackmamba.runtime import device

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router, TopKRouter


class _Counted(Router):
    """What our two routers share: a bias, which megatron-core ties to the bias of every linear, and the counts."""

    def _complete(self, config: MegatronConfig) -> None:
        self.bias = without_decay(
            replicated(empty(config.num_moe_experts, dtype=config.params_dtype), config.sequence_parallel)
        )
        # With recomputation a forward runs twice, the first time without gradients; count that one.
        self.runs_twice = config.recompute != "none"
        self.register_buffer(
            "tokens_E",
            torch.zeros(config.num_moe_experts, dtype=torch.int64, device=device.device()),
            persistent=False,
        )

    def gating(self, hidden_SBD: Tensor) -> Tensor:
        """Return logits in fp32 (or float64): rounded to bf16, near-equal experts would swap."""
        return F.linear(*(x.to(self.config.full_precision) for x in (hidden_SBD, self.weight, self.bias)))

    @property
    def counter_E(self) -> Tensor | None:
        """What this forward adds its counts to; None where it must not."""
        return None if self.runs_twice and torch.is_grad_enabled() else self.tokens_E


class SinkhornRouter(_Counted):
    """The paper's: in training a balanced top-1 choice by Sinkhorn, else the largest logit; sigmoid(logit) scales."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection)
        self._complete(config)
        self.described = config.described.router
        self.group = _balanced_over(self.described.scope, pg_collection)

    def forward(
        self, hidden_SBD: Tensor, padding_mask: Tensor | None = None, *, as_map: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return (weights_TE, chosen_TE), zero and False but for the chosen expert of each token, as dispatchers take
        them; else (weight_T, choice_T)."""
        logits_TE = self.gating(hidden_SBD).flatten(0, 1)
        choice_T = self.routing(logits_TE.detach())
        if not as_map:
            return torch.sigmoid(logits_TE.gather(1, choice_T[:, None])[:, 0]), choice_T
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, choice_T[:, None], True)
        return torch.sigmoid(logits_TE) * chosen_TE, chosen_TE

    def routing(self, logits_TE: Tensor) -> Tensor:
        """Return the expert of each token, `[T]`."""
        if self.training:
            return sinkhorn_choice(
                logits_TE,
                iterations=self.described.iterations,
                temperature=self.described.temperature,
                start=self.described.start,
                group=self.group,
                tokens_E=self.counter_E,
            )
        choice_T = logits_TE.max(dim=-1).indices
        self.tokens_E.scatter_add_(0, choice_T, torch.ones_like(choice_T))
        return choice_T


class SoftmaxRouter(_Counted, TopKRouter):
    """Softmax top-k with an auxiliary load-balancing loss, for ablations: megatron-core's."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection)
        self._complete(config)

    def forward(self, hidden_SBD: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights_TE, chosen_TE = super().forward(hidden_SBD, padding_mask)
        if (counter_E := self.counter_E) is not None:
            counter_E += chosen_TE.sum(dim=0)
        return weights_TE, chosen_TE


def _balanced_over(scope: str, groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """The ranks whose tokens Sinkhorn balances together; None when it is this rank alone."""
    group = {"rank": None, "tensor": groups.tp_cp, "data": groups.tp_dp_cp}[scope]
    return group if group is not None and group.size() > 1 else None
