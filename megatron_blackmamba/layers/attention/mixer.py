"""Causal attention on PyTorch's fused kernel, inside megatron-core's SelfAttention.

megatron-core's own core attention without Transformer Engine writes out the S × S scores, and shares no sequences
between ranks. This one does not write them, and does share (`ops/attention.py`).

Shapes: S sequence, B batch, H heads of this rank, G key-value heads of this rank, C channels a head.
"""

import torch
from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import linears
from megatron_blackmamba.model.norms import RMSNorm
from megatron_blackmamba.ops.attention import Documents, attention
from megatron_blackmamba.ops.context import several

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


class CausalAttention(MegatronModule):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection, **_: object):
        super().__init__(config)
        self.context = several(pg_collection.cp)
        self.largest_H: Tensor | None = None
        """With optimizer.qk_clip, the largest logit of each head since the update."""

    def forward(
        self, q_SBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, attention_mask: Documents | None = None, **_: object
    ) -> Tensor:
        """Attend; in the place of a mask megatron-core hands on where documents begin (`LayerInputs`)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHC, k_SBGC, v_SBGC))
        scale = self.config.described.attention_scale
        largest_H = self.largest_H if self.training and torch.is_grad_enabled() else None
        y = attention(q, k, v, attention_mask, self.context, scale, largest_H)
        return y.permute(2, 0, 1, 3).flatten(2)


class AttentionMixer(SelfAttention):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        column, row = linears(config.kernels.linear)
        norm = RMSNorm if config.described.attention.qk_norm else None
        super().__init__(
            config,
            SelfAttentionSubmodules(
                linear_qkv=column, core_attention=CausalAttention, linear_proj=row, q_layernorm=norm, k_layernorm=norm
            ),
            layer_number,
            AttnMaskType.causal,
            pg_collection=pg_collection,
        )

    def forward(self, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
        y_SBD, _ = super().forward(hidden_SBD, attention_mask=inputs.documents, rotary_pos_emb=inputs.rotary)
        return y_SBD
