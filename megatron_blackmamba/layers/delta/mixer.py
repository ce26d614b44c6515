"""The mixer of the delta rule on megatron-core's parallel linears.

Each tensor-parallel rank owns some heads from in_proj to out_proj, with their keys. With a decay for each key channel,
each rank projects some of the R numbers that the decays of all heads follow from, and all gather them. The weight of
the norm is the same for all heads, so its gradient is summed over the ranks. Ranks that share a sequence pass on states
and the matrices that map them (`ops/delta`).

Shapes: S sequence, B batch, D model, R rank of decays.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.layers.delta.arithmetic import mixed
from megatron_blackmamba.layers.delta.kind import by_channel, in_proj, rank, sizes
from megatron_blackmamba.model.channels import Channels, Convolution
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.norms import SharedNorm
from megatron_blackmamba.model.recurrent_mixer import RecurrentMixer
from megatron_blackmamba.model.sharding import empty, without_decay
from megatron_blackmamba.ops.delta import delta, delta_part

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region


class Decays(Channels):
    """The projection of a token's R numbers to the decays of this rank's heads."""

    def forward(self, decay_BSR: Tensor) -> Tensor:
        return F.linear(decay_BSR, self.weight)


class DeltaMixer(RecurrentMixer):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        model = config.described
        whole = in_proj(model)
        super().__init__(config, pg_collection, whole.shape[0])
        ranks = self.tp_group.size()
        self.rows, self.backend = whole.share(ranks), config.kernels.delta
        H, _, K, V = sizes(model)
        decays = (H * K if by_channel(model) else H) // ranks
        filters = empty(self.rows.count("q k v"), 1, model.conv_kernel, dtype=config.params_dtype)
        self.conv1d = Convolution(filters, None)
        self.decay_proj = None
        if by_channel(model):
            self.decay_proj = Decays(empty(decays, rank(model), dtype=config.params_dtype), None)
        self.dt_bias = without_decay(empty(decays, dtype=config.full_precision))
        self.A_log = without_decay(empty(H // ranks, dtype=config.full_precision))
        self.norm = SharedNorm(V, config, self.tp_group)
        self.make_out_proj(H * V)

    def between(self, projected_BSX: Tensor, inputs: LayerInputs) -> Tensor:
        return mixed(
            projected_BSX,
            self.rows,
            self.config.described,
            self.dt_bias,
            self.A_log,
            lambda qkv: self.conv1d(qkv, inputs.reset_BS, self.context),
            self._decays,
            partial(self._scan, inputs.reset_BS),
            self.norm,
        )

    def _decays(self, decay: Tensor) -> Tensor:
        if self.decay_proj is None:
            return decay
        if self.tp_group.size() > 1:
            decay = all_gather_last_dim_from_tensor_parallel_region(decay, group=self.tp_group)
        return self.decay_proj(decay)

    def _scan(self, reset_BS: Tensor | None, *inputs: Tensor) -> Tensor:
        if self.context is None:
            return delta(*inputs, reset_BL=reset_BS, backend=self.backend)[0]
        return delta_part(*inputs, group=self.context, reset_BL=reset_BS, backend=self.backend)
