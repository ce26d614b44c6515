"""What the recurrent mixers have in common: in_proj, whose rows the ranks share, and out_proj.

Shapes: S sequence, B batch, D model, I channels of this rank between the two, X rows of in_proj on this rank.
"""

from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import column, row
from megatron_blackmamba.ops.context import several

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule


class RecurrentMixer(MegatronModule):
    """A mixer makes its parameters between `super().__init__()` and `make_out_proj`, in the order of the layer."""

    def __init__(self, config: MegatronConfig, groups: ProcessGroupCollection, rows: int) -> None:
        super().__init__(config)
        self.tp_group, self.context = groups.tp, several(groups.cp)
        self.in_proj = column(config.described.hidden_size, rows, config, self.tp_group)

    def make_out_proj(self, inner: int) -> None:
        """Make out_proj. inner: The channels of all ranks."""
        self.out_proj = row(inner, self.config.described.hidden_size, self.config, self.tp_group)

    def between(self, projected_BSX: Tensor, inputs: LayerInputs) -> Tensor:
        """Return what out_proj reads, `[B, S, I]`."""
        raise NotImplementedError

    def forward(self, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
        # Everything stays in memory as [S, B, ...]: the ops take any strides, so what they see is never copied.
        projected_SBX, _ = self.in_proj(hidden_SBD)
        y_BSI = self.between(projected_SBX.transpose(0, 1), inputs)
        out_SBD, _ = self.out_proj(y_BSI.transpose(0, 1).contiguous())
        return out_SBD
