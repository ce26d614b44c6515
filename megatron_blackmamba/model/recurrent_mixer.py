"""What the recurrent mixers have in common: in_proj, whose rows the ranks share, and out_proj.

Shapes: S sequence, B batch, D model, I channels of this rank between the two, X rows of in_proj on this rank.
"""

from torch import Tensor

from megatron_blackmamba.layers import LayerKind
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import column, row
from megatron_blackmamba.model.sharding import empty, replicated, without_decay
from megatron_blackmamba.ops.context import several
from megatron_blackmamba.registry import KindError

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
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


class KindMixer(RecurrentMixer):
    """A mixer of the weights that its kind declares, and of what the kind computes `between` in_proj and out_proj."""

    def __init__(
        self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection, kind: LayerKind
    ) -> None:
        own = dict(kind.weights(config.described))
        if missing := {"in_proj.weight", "out_proj.weight"} - own.keys():
            raise KindError(f"{type(kind).__name__}.weights lacks {', '.join(sorted(missing))}, and it names no mixer.")
        first, last = own.pop("in_proj.weight"), own.pop("out_proj.weight")
        super().__init__(config, pg_collection, first.shape[0])
        self.kind, self.own, self.parts = kind, own, first.share(self.tp_group.size())
        for name, weight in own.items():
            dtype = config.full_precision if name in kind.kept_in_fp32 else config.params_dtype
            parameter = empty(*weight.share(self.tp_group.size()).shape, dtype=dtype)
            if weight.axis is None:
                replicated(parameter, sequence_parallel=False)  # `between` gets whole sequences
            setattr(self, name, parameter if weight.columns else without_decay(parameter))
        self.make_out_proj(last.columns[0])

    def between(self, projected_BSX: Tensor, inputs: LayerInputs) -> Tensor:
        weights = {name: getattr(self, name) for name in self.own}
        for name in (name for name, weight in self.own.items() if weight.axis is None):
            # Each rank reads it for channels of its own, so its gradients are summed over the ranks.
            weights[name] = copy_to_tensor_model_parallel_region(weights[name], group=self.tp_group)
        return self.kind.computed(self.parts, projected_BSX, weights | {"inputs": inputs}, self.config.described)[0]
