"""The Mamba-1 mixer on megatron-core's parallel linears.

Each tensor-parallel rank owns a slice of the inner channels from in_proj to out_proj. Only x_proj mixes channels: its
output (dt, B, C) is summed over the ranks. Every rank uses the whole sum for its own channels, so the gradients of the
sum are also added over the ranks. `model.mamba_norms` stands between the two sums, equal on every rank.

Under context parallelism each rank has a contiguous part of every sequence. The convolution then starts with the last
inputs of the previous part, and the scan with its final state (`ops/context.py`).

The rows of in_proj are [x | z]. Each rank has a slice of both halves, since a plain row split would give one rank only
x. The checkpoint stores the slices as one [x | z] matrix.

Shapes: S sequence, B batch, D model, I inner channels of this rank, N state, R rank of dt, K convolution width.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_blackmamba.engine.parts.layers import leave_whole
from megatron_blackmamba.layers.mamba.arithmetic import of_scan
from megatron_blackmamba.layers.mamba.kind import x_proj
from megatron_blackmamba.layers.recurrent import NORMS
from megatron_blackmamba.model.channels import Channels
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.linears import row
from megatron_blackmamba.model.norms import RMSNorm
from megatron_blackmamba.model.recurrent_mixer import RecurrentMixer
from megatron_blackmamba.model.sharding import empty, replicated, without_decay
from megatron_blackmamba.ops.causal_conv1d.halves import Halves, convolve_first_half
from megatron_blackmamba.ops.causal_conv1d.part import causal_conv1d_part
from megatron_blackmamba.ops.selective_scan import selective_scan
from megatron_blackmamba.ops.selective_scan.part import selective_scan_part

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region


class ConvolutionOfRows(Channels):
    """The convolution of x in rows [x | z], one filter a channel, then SiLU."""

    def forward(self, xz_BSJ: Tensor, reset_BS: Tensor | None, context: ProcessGroup | None = None) -> Halves:
        weight_IK = self.weight.squeeze(1)
        if context is None:
            return convolve_first_half(xz_BSJ, weight_IK, self.bias, reset_BL=reset_BS)
        x_BSI, z_BSI = xz_BSJ.chunk(2, dim=-1)
        y_BSI = causal_conv1d_part(x_BSI, weight_IK, self.bias, group=context, reset_BL=reset_BS)
        return Halves(y_BSI, y_BSI, z_BSI)


class TimeStepProjection(Channels):
    """The projection of dt from its low rank to the channels."""

    bias: nn.Parameter

    def forward(self, dt_SBR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product and the bias, which the scan adds."""
        return F.linear(dt_SBR, self.weight), self.bias


class MambaMixer(RecurrentMixer):
    def __init__(self, config: MegatronConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        model = config.described
        inner = model.inner_size
        super().__init__(config, pg_collection, 2 * inner)
        self.backend, self.keep_states = config.kernels.scan, config.kernels.scan_states == "keep"
        local = inner // self.tp_group.size()
        self.conv1d = ConvolutionOfRows(
            empty(local, 1, model.conv_kernel, dtype=config.params_dtype), empty(local, dtype=config.params_dtype)
        )
        self.shared = x_proj(model)
        outputs = self.shared.shape[0]
        self.x_proj = row(inner, outputs, config, self.tp_group)
        # Every rank needs (dt, B, C) of the whole sequence: sum over the ranks, do not scatter along the sequence.
        leave_whole(self.x_proj)
        self.norms = NORMS if model.mamba_norms else ()
        for name, part in zip(self.norms, self.shared.rows, strict=False):
            norm = RMSNorm(config, self.shared.count(part), config.layernorm_epsilon)
            replicated(norm.weight, sequence_parallel=False)  # every rank has the whole sum of the whole sequence
            self.add_module(name, norm)
        self.dt_proj = TimeStepProjection(
            empty(local, model.dt_rank_or_default, dtype=config.params_dtype), empty(local, dtype=config.full_precision)
        )
        self.A_log = without_decay(empty(local, model.state_size, dtype=config.full_precision))
        self.D = without_decay(empty(local, dtype=config.full_precision))
        self.make_out_proj(inner)

    def between(self, projected_BSX: Tensor, inputs: LayerInputs) -> Tensor:
        halves = self.conv1d(projected_BSX, inputs.reset_BS, self.context)

        (delta_SBI, delta_bias_I), B_SBN, C_SBN = of_scan(
            halves.x_BLI.transpose(0, 1),
            self.shared,
            lambda x_SBI: self.x_proj(x_SBI)[0],
            [getattr(self, name) for name in self.norms],
            self.dt_proj,
            shared=partial(copy_to_tensor_model_parallel_region, group=self.tp_group),
        )

        scan: Any = partial(selective_scan, log_A=True)
        A_IN: Tensor = self.A_log
        if halves.gradient is not None:
            scan = partial(scan, z_gradient=halves.gradient.of_second_half)
        if self.context is not None:
            scan, A_IN = partial(selective_scan_part, group=self.context), -torch.exp(A_IN)
        return scan(
            halves.x_again_BLI,
            delta_SBI.transpose(0, 1),
            A_IN,
            B_SBN.transpose(0, 1),
            C_SBN.transpose(0, 1),
            self.D,
            z_BLI=halves.z_BLI,
            delta_bias_I=delta_bias_I,
            reset_BL=inputs.reset_BS,
            keep_states=self.keep_states,
            backend=self.backend,
        )
