"""Multi-token prediction: an extra depth that predicts the token after the next one (DeepSeek-V3).

It reads the stream behind the last layer, or the last norm of it, and the embedding of the next token. Embedding and
head are the model's own.
megatron-core's MultiTokenPredictionLayer holds a transformer layer with self-attention only.

Shapes: S sequence (of this rank), B batch, D model.
"""

import torch
from torch import Tensor, nn

from megatron_blackmamba.layers import layers_of
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import WholeLinear
from megatron_blackmamba.model.norms import RMSNorm
from megatron_blackmamba.model.sharding import sharded_modules
from megatron_blackmamba.model.stack import Block, added

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule


class ExtraDepth(MegatronModule):
    """The layers of model.mtp.pattern, between a projection and a norm of their own."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection):
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon) for _ in range(3)
        )
        self.proj = WholeLinear(2 * config.hidden_size, config.hidden_size, config)
        self.layers = nn.ModuleList(
            # megatron-core's logs have no row for more layers than num_layers
            Block(config, kind, config.num_layers, pg_collection, recompute=config.recompute in kind.recompute)
            for kind in layers_of(config.described.mtp.pattern or "")
        )

    def forward(self, read_SBD: Tensor, embedded_SBD: Tensor, inputs: LayerInputs) -> Tensor:
        """Return what the head reads to predict the token after the next one.

        Args:
            read_SBD: The residual stream of the model behind its last layer, or behind its last norm.
            embedded_SBD: The embeddings of the next tokens.
            inputs: Of the layers, for the next tokens.
        """
        both_SBC = torch.cat([self.embedding_norm(embedded_SBD), self.hidden_norm(read_SBD)], dim=-1)
        x_SBD = self.proj(both_SBC).to(embedded_SBD.dtype)
        branch_SBD: Tensor | None = None
        for block in self.layers:
            x_SBD, branch_SBD = block(x_SBD, branch_SBD, inputs)
        normed_SBD: Tensor = self.final_norm(added(x_SBD, branch_SBD))
        return normed_SBD

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        modules = {f"{name}.": module for name, module in self.named_children() if name != "layers"}
        modules |= {f"layers.{name}.": block for name, block in self.layers.named_children()}
        return sharded_modules(modules, prefix, sharded_offsets, metadata, self.tp_group)
