"""A layer kind in one file, as somebody else would add it: the mean of all tokens so far, between two projections."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from megatron_blackmamba.kinds import Cannot, Decoding, Division, LayerKind

if TYPE_CHECKING:
    from torch import Tensor


class RunningMean(LayerKind):
    letter, name = "A", "running mean"
    block = f"{__name__}:block"
    writes_to_residual = ("out_proj.weight",)

    def divisions(self, model):
        return [Division("model.hidden_size", model.hidden_size, "tensor")]

    def parts(self, model):
        return {"mean": Fraction(1)}

    def part_of(self, parameter):
        return "mean"

    def shapes(self, model):
        D = model.hidden_size
        return {"in_proj.weight": (D, D), "gain": (D,), "out_proj.weight": (D, D)}

    def initial(self, name, shape, model, random):
        import torch

        return torch.ones(shape) if name == "gain" else None

    def flops(self, model, sequence):
        return {"mean_projections": 2 * 2 * model.hidden_size**2}

    def kept(self, at):
        """in_proj's input, the mean before and after the gain, and the counts that divide it."""
        D = at.model.hidden_size
        return at.width * D * (at.here + 2 * at.whole // at.tensor) + 4 * at.whole

    def traffic(self, at, passes):
        return {"tensor": (2 * passes + 1) * at.stream}

    def exported(self, model):
        return Cannot("running mean layers (A) have no class in the modeling files")

    def decoding(self, model):
        return RunningMeanDecoding()


def block(model, kernels):
    import torch

    from megatron_blackmamba.model import specs
    from megatron_blackmamba.model.sharding import empty, sharded, without_decay
    from megatron_blackmamba.model.stack import Block

    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    column, row = specs.linears(kernels.linear)

    class Mixer(MegatronModule):
        def __init__(self, config, layer_number, pg_collection):
            super().__init__(config)
            D = config.hidden_size
            how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
            how |= {"is_expert": False, "tp_group": pg_collection.tp}
            self.tp_group = pg_collection.tp
            channels = D // self.tp_group.size()  # of this rank
            self.gain = without_decay(sharded(empty(channels, dtype=config.params_dtype), 0))
            self.in_proj = build_module(column, D, D, gather_output=False, **how)
            self.out_proj = build_module(row, D, D, input_is_parallel=True, **how)

        def forward(self, hidden_SBD, reset_BS):
            x_SBI, _ = self.in_proj(hidden_SBD)
            x_BSI = x_SBI.transpose(0, 1).to(self.config.full_precision)
            mean_BSI = sums(x_BSI, reset_BS) / sums(torch.ones_like(x_BSI[..., :1]), reset_BS)
            y_SBI = mean_BSI.transpose(0, 1).to(x_SBI.dtype) * self.gain
            return self.out_proj(y_SBI.contiguous())[0]

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # has the linears, and gain unsharded
            groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
            own = make_sharded_tensors_for_checkpoint(
                {"gain": self.gain}, prefix, {"gain": 0}, sharded_offsets, **groups
            )
            return state | own

    class MeanBlock(Block):
        def mix(self, hidden_SBD, inputs):
            return self.mixer(hidden_SBD, inputs.reset_BS)

    return specs.block(MeanBlock, ModuleSpec(Mixer))


def sums(x_BLD, reset_BL):
    """Return the sum of each document's tokens so far; a document begins where reset_BL is true."""
    import torch

    sums_BLD = x_BLD.cumsum(1)
    if reset_BL is None:
        return sums_BLD
    place_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
    first_BL1 = torch.where(reset_BL, place_L, 0).cummax(1).values[..., None]
    return sums_BLD - (sums_BLD - x_BLD).gather(1, first_BL1.expand_as(x_BLD))


@dataclass(frozen=True)
class MeanLayer:
    in_proj: Tensor
    gain: Tensor
    out_proj: Tensor


class RunningMeanDecoding(Decoding):
    def pack(self, get, model, dtype, device):
        return MeanLayer(get("in_proj.weight", dtype), get("gain", dtype), get("out_proj.weight", dtype))

    def memory(self, model, batch, dtype, device):
        import torch

        return [torch.zeros(batch, model.hidden_size, device=device), torch.zeros(batch, 1, device=device)]

    def step(self, run, layer, memory, x_BD, inputs):
        total_BD, count_B1 = memory
        total_BD += run.times(x_BD, layer.in_proj)
        count_B1 += 1
        return run.times(total_BD / count_B1 * layer.gain, layer.out_proj)

    def read(self, run, layer, memory, x_BLD, inputs):
        import torch
        import torch.nn.functional as F

        keep_BL1, reset_BL = inputs.keep_BL1, inputs.reset_BL
        total_BD, count_B1 = memory
        x_BLD = F.linear(x_BLD, layer.in_proj).float()
        keep_BL1 = torch.ones_like(x_BLD[..., :1]) if keep_BL1 is None else keep_BL1.float()
        if reset_BL is not None:
            reset_BL = F.pad(reset_BL, (1, 0))  # the memory is in front of the tokens
        totals_BLD = sums(torch.cat((total_BD[:, None], x_BLD * keep_BL1), 1), reset_BL)[:, 1:]
        counts_BL1 = sums(torch.cat((count_B1[:, None], keep_BL1), 1), reset_BL)[:, 1:]
        total_BD.copy_(totals_BLD[:, -1])
        count_B1.copy_(counts_BL1[:, -1])
        y_BLD = totals_BLD / counts_BL1.clamp(min=1) * layer.gain
        return F.linear(y_BLD.to(layer.out_proj.dtype), layer.out_proj)
