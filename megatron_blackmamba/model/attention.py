"""Causal attention on PyTorch's fused kernel, inside megatron-core's SelfAttention.

megatron-core's own core attention without Transformer Engine writes out the S × S scores; this one does not.

Shapes: S sequence, B batch, H heads of this rank, G key-value heads of this rank, C channels a head.
"""

import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig

from megatron.core.transformer.module import MegatronModule


class CausalAttention(MegatronModule):
    def __init__(self, config: MegatronConfig, layer_number: int, **_: object):
        super().__init__(config)

    def forward(
        self, q_SBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHC, k_SBGC, v_SBGC))
        scale = self.config.described.attention_scale
        grouped = q.shape[1] != k.shape[1]
        out_BHSC = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return out_BHSC.permute(2, 0, 1, 3).flatten(2)
