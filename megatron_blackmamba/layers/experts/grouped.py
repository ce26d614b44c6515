"""The experts of one rank, as two stacked weights, behind megatron-core's token dispatchers.

Expert parallelism splits the first axis. Expert tensor parallelism splits the hidden units of each expert, for gate and
up alike. So fc1 has a separate axis for the two: [E, 2, F, D], gate first. Without a gate it is [E, 1, F, D].

Shapes: T tokens sent to this rank's experts, sorted by expert, D their width (model.latent_size or the model's), E
experts of this rank, F hidden units of this rank.
"""

from typing import Any

from torch import Tensor, nn

from megatron_blackmamba.layers.experts.kind import sizes
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.sharding import empty
from megatron_blackmamba.ops.experts import grouped_experts

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule


class GroupedExperts(MegatronModule):
    def __init__(
        self,
        num_local_experts: int,
        config: MegatronConfig,
        submodules: object = None,
        *,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ):
        super().__init__(config)
        self.activation, self.gate = config.described.activation, config.described.gated
        self.backend = "fp8" if config.kernels.linear == "fp8" else "auto"
        _, _, width, hidden = sizes(config.described)
        hidden //= pg_collection.expt_tp.size()
        self.fc1 = self._parameter(num_local_experts, 2 if self.gate else 1, hidden, width)
        self.fc2 = self._parameter(num_local_experts, width, hidden)

    def _parameter(self, *shape: int) -> nn.Parameter:
        parameter: Any = empty(*shape, dtype=self.config.params_dtype)
        # Experts are reduced over the ranks that hold the same experts, at every layout: with `allreduce` set when
        # expert parallelism is off, megatron-core lets replicas on tensor-parallel ranks drift apart.
        parameter.allreduce = False
        return parameter

    def forward(self, x_TD: Tensor, tokens_per_expert_E: Tensor, weights_T: Tensor) -> tuple[Tensor, None]:
        fc1_EGD = self.fc1.flatten(1, 2)
        return grouped_experts(
            x_TD,
            tokens_per_expert_E,
            fc1_EGD,
            self.fc2,
            weights_T,
            activation=self.activation,
            gate=self.gate,
            backend=self.backend,
        ), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass."""
