"""The Mamba-2 mixer on megatron-core's parallel linears.

Each tensor-parallel rank owns some groups of heads from in_proj to out_proj: their z, x, B, C and dt. Only out_proj
mixes groups, so it is the only communication. Ranks that share a sequence pass on states (`ops/context.py`).

A checkpoint stores in_proj and the convolution as the whole matrices of Mamba-2, with rows [z | x | B | C | dt] and
[x | B | C]. Each part is sharded separately.

megatron-core also has a Mamba-2 mixer. It requires mamba-ssm and thus CUDA, supports that package's kernels only, and
cannot reset the state between documents.

Shapes: S sequence, B batch, D model, I inner channels of this rank, H heads, P channels of a head, G groups, N state.
Q = I + 2GN channels of the convolution.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.layers.mamba2.arithmetic import mixed
from megatron_blackmamba.layers.mamba2.kind import in_proj, sizes
from megatron_blackmamba.layers.recurrent import NORMS
from megatron_blackmamba.model.channels import Convolution
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.norms import GatedNorm, GroupNorm
from megatron_blackmamba.model.recurrent_mixer import RecurrentMixer
from megatron_blackmamba.model.sharding import empty, without_decay
from megatron_blackmamba.ops.ssd import ssd
from megatron_blackmamba.ops.ssd.part import ssd_part

from megatron.core.process_groups_config import ProcessGroupCollection


class Mamba2Mixer(RecurrentMixer):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        model = config.described
        inner, whole = sizes(model)[0], in_proj(model)
        super().__init__(config, pg_collection, whole.shape[0])
        ranks, self.backend = self.tp_group.size(), config.kernels.ssd
        groups = model.mamba2.groups // ranks
        self.rows = whole.share(ranks)
        channels, heads = self.rows.count("x B C"), self.rows.count("dt")
        self.conv1d = Convolution(
            empty(channels, 1, model.conv_kernel, dtype=config.params_dtype),
            empty(channels, dtype=config.params_dtype),
        )
        self.dt_bias, self.A_log, self.D = (without_decay(empty(heads, dtype=config.full_precision)) for _ in range(3))
        self.norms = NORMS[1:] if model.mamba_norms else ()
        for name in self.norms:
            self.add_module(name, GroupNorm(self.rows.count("B"), groups, config))
        self.norm = GatedNorm(inner // ranks, groups, config)
        self.make_out_proj(inner)

    def between(self, projected_BSX: Tensor, inputs: LayerInputs) -> Tensor:
        return mixed(
            projected_BSX,
            self.rows,
            self.config.described,
            self.dt_bias,
            lambda xBC_BSQ: self.conv1d(xBC_BSQ, inputs.reset_BS, self.context),
            [getattr(self, name) for name in self.norms],
            partial(self._scan, inputs.reset_BS),
            self.norm,
        )

    def _scan(self, reset_BS: Tensor | None, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        scan: Any = ssd if self.context is None else partial(ssd_part, group=self.context)
        how = {"dt_bias_H": self.dt_bias, "reset_BL": reset_BS, "backend": self.backend}
        return scan(x, dt, -torch.exp(self.A_log), B, C, self.D, **how)
