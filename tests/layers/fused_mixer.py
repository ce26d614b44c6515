"""The mixer of `fused`: a mean and its gate, from one matrix."""

from megatron_blackmamba.model.linears import column
from tests.layers.running_mean.arithmetic import mean
from tests.layers.running_mean.mixer import MeanMixer


class GatedMixer(MeanMixer):
    def __init__(self, config, layer_number, pg_collection):
        super().__init__(config, layer_number, pg_collection)
        self.in_proj = column(config.hidden_size, 2 * config.hidden_size, config, pg_collection.tp)

    def forward(self, hidden_SBD, inputs):
        x_BSI, gate_BSI = self.in_proj(hidden_SBD)[0].transpose(0, 1).chunk(2, dim=-1)
        y_BSI = mean(x_BSI, inputs.reset_BS) * gate_BSI.sigmoid() * self.gain
        return self.out_proj(y_BSI.transpose(0, 1).contiguous())[0]
