"""The running mean as a torch module."""

from megatron_blackmamba.model.linears import column, row
from megatron_blackmamba.model.sharding import empty, without_decay

from megatron.core.transformer.module import MegatronModule

from .arithmetic import mean


class MeanMixer(MegatronModule):
    def __init__(self, config, layer_number, pg_collection):
        super().__init__(config)
        D, tp_group = config.hidden_size, pg_collection.tp
        self.gain = without_decay(empty(D // tp_group.size(), dtype=config.params_dtype))  # of this rank's channels
        self.in_proj = column(D, D, config, tp_group)
        self.out_proj = row(D, D, config, tp_group)

    def forward(self, hidden_SBD, inputs):
        x_SBI, _ = self.in_proj(hidden_SBD)
        mean_BSI = mean(x_SBI.transpose(0, 1).to(self.config.full_precision), inputs.reset_BS)
        y_SBI = mean_BSI.transpose(0, 1).to(x_SBI.dtype) * self.gain
        return self.out_proj(y_SBI.contiguous())[0]
