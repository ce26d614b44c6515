"""The Mamba-3 mixer on megatron-core's parallel linears.

Each tensor-parallel rank owns some groups of heads from in_proj to out_proj, as in Mamba-2. The angles are the same for
all heads: each rank projects some of them, and all gather them. The norms of B and C are the same for all groups, so
their gradients are summed over the ranks.

A checkpoint stores in_proj as one matrix with rows [z | x | B | C | dt | A | trap | angle]. Each part is sharded by
itself, and so is each of the R parts of B and C.

Shapes: S sequence, B batch, D model, I inner channels of this rank, H heads, P channels of a head, G groups, N state,
R rank.
"""

from functools import partial
from typing import Any

from torch import Tensor

from megatron_blackmamba.layers.mamba3.arithmetic import mixed
from megatron_blackmamba.layers.mamba3.kind import MIX, NORMS, in_proj
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.norms import GroupNorm, SharedNorm
from megatron_blackmamba.model.recurrent_mixer import RecurrentMixer
from megatron_blackmamba.model.sharding import empty, without_decay
from megatron_blackmamba.ops.mamba3 import BACKENDS, Rates, mamba3

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
)


class Mamba3Mixer(RecurrentMixer):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        model = config.described
        whole = in_proj(model)
        super().__init__(config, pg_collection, whole.shape[0])
        self.backend = config.kernels.ssd if config.kernels.ssd in BACKENDS else "chunked"
        self.rows = whole.share(self.tp_group.size())
        inner, heads = self.rows.count("x"), self.rows.count("dt")
        N, R = model.mamba3.state_size, model.mamba3.rank

        shapes = {"dt_bias": (heads,), "B_bias": (heads, R, N), "C_bias": (heads, R, N), "D": (heads,)}
        for name, shape in shapes.items():
            self.register_parameter(name, without_decay(empty(*shape, dtype=config.full_precision)))
        for name in MIX:
            factors = empty(heads, R, model.mamba3.head_dim, dtype=config.full_precision)
            self.register_parameter(name, without_decay(factors) if R > 1 else None)
        for name in NORMS:
            self.add_module(name, SharedNorm(N, config, self.tp_group))
        self.norm = GroupNorm(inner, heads, config) if model.mamba3.output_norm else None
        self.make_out_proj(model.inner_size)

    def between(self, projected_BSX: Tensor, inputs: LayerInputs) -> Tensor:
        return mixed(
            projected_BSX,
            self.rows,
            self.config.described,
            self.dt_bias,
            [getattr(self, name) for name in NORMS],
            partial(self._scan, inputs.reset_BS),
            self.norm,
            (self.mimo_z, self.mimo_o),
            self._whole_angle,
        )

    def _whole_angle(self, angle: Tensor) -> Tensor:
        if self.tp_group.size() == 1:
            return angle
        return all_gather_last_dim_from_tensor_parallel_region(angle, group=self.tp_group)

    def _scan(self, reset_BS: Tensor | None, x: Tensor, rates: Rates, B: Tensor, C: Tensor) -> Tensor:
        how: dict[str, Any] = {"reset_BL": reset_BS, "group": self.context, "backend": self.backend}
        return mamba3(x, rates, B, C, self.B_bias, self.C_bias, self.D, mix_HRP=self.mimo_x, **how)[0]
