"""Experts by a hash of the token id, without any weights: the random hash of Hash Layers (arXiv 2106.04426).

A token id has a pseudo-random number for each expert, and goes to the experts with the largest ones, in every layer,
in training and inference. Their outputs are averaged.

Shapes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.routers.base import RouterKind, Tokens, Use, largest

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig


class Hash(RouterKind):
    name = "hash"
    keys = ()
    depends_on = "the token id alone"
    balances_micro_batches = False
    learned = False
    reads_ids = True
    modeling = "megatron_blackmamba.hf.layers_blackmamba:HashRouter"

    def choose(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        return largest(self.selecting(logits_TE, at), at.model.top_k)

    def selecting(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        import torch

        assert at.ids_T is not None
        experts_E = torch.arange(at.model.experts, device=at.ids_T.device)
        return mixed(mixed(at.ids_T)[:, None] ^ (experts_E + 1)) / 2.0**32

    def use(self, model: ModelConfig) -> Use:
        return Use("softmax", normalized=True)  # of equal logits: 1 / K

    def layouts(self, model: ModelConfig) -> bool:
        return True


def mixed(x: Tensor) -> Tensor:
    """Return 32-bit hashes of 32-bit numbers, in int64, whose products do not overflow; hf/ has the same function."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
