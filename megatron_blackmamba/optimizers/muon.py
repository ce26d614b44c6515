"""Muon: the momentum of each matrix is made orthogonal before it updates the matrix (Jordan 2024, arXiv 2502.16982).

Adam updates all that is no matrix between two streams: embedding, head, vectors, convolutions, `A_log`, and what the
kind of a layer names (`by_adam`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.optimizers.base import (
    BY_ADAM,
    DECLARED,
    EMBEDDING_OR_HEAD,
    NO_DECAY,
    Cannot,
    OptimizerKind,
)

if TYPE_CHECKING:
    from torch import Tensor


class Muon(OptimizerKind):
    """`optimizer.kind: muon`; `engine/muon.py` has the update."""

    name = "muon"
    keys = ("momentum", "beta1", "beta2", "eps", "moments", "matrices", "newton_schulz", "qk_clip")
    state = ("momentum_buffer",)
    sharding = True
    by_matrix = True
    widens = True
    unsharded = Cannot("a matrix is updated by one of the ranks that share it")

    def number_bytes(self, settings, full):
        return 2 if settings.moments == "bf16" else full

    def megatron(self, settings):
        return {
            "optimizer": "adam",
            "adam_beta1": settings.beta1,
            "adam_beta2": settings.beta2,
            "adam_eps": settings.eps,
        }

    def keeps(self, weight: Tensor) -> tuple[str, ...]:
        return self.state if self.orthogonalizes(weight) else ("exp_avg", "exp_avg_sq")

    def orthogonalizes(self, weight):
        if any(getattr(weight, mark, False) for mark in (BY_ADAM, NO_DECAY, EMBEDDING_OR_HEAD)):
            return False
        return hasattr(getattr(weight, DECLARED, None), "parts") or weight.dim() == 2
