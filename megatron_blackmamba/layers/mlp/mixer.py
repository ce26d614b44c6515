"""megatron-core's MLP on its parallel linears."""

from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import linears

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules


class DenseMLP(MLP):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        column, row = linears(config.kernels.linear)
        super().__init__(config, MLPSubmodules(linear_fc1=column, linear_fc2=row), tp_group=pg_collection.tp)

    def forward(self, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
        y_SBD, _ = super().forward(hidden_SBD)
        return y_SBD
