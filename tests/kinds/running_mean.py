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
        return {"in_proj.weight": (D, D), "out_proj.weight": (D, D)}

    def initial(self, name, shape, model, random):
        return None

    def flops(self, model, sequence):
        return {"mean_projections": 2 * 2 * model.hidden_size**2}

    def kept(self, at):
        """in_proj's input, the mean, and the counts that divide it."""
        D = at.model.hidden_size
        return at.width * D * (at.here + at.whole // at.tensor) + 4 * at.sequence

    def traffic(self, at, passes):
        return {"tensor": (2 * passes + 1) * at.stream}

    def exported(self, model):
        return Cannot("running mean layers (A) have no class in the modeling files")

    def decoding(self, model):
        return RunningMeanDecoding()


def block(model, kernels):
    import torch

    from megatron_blackmamba.model import specs
    from megatron_blackmamba.model.stack import Block

    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    column, row = specs.linears(kernels.linear)

    class Mixer(MegatronModule):
        def __init__(self, config, layer_number, pg_collection):
            super().__init__(config)
            D = config.hidden_size
            how = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
            how |= {"is_expert": False, "tp_group": pg_collection.tp}
            self.tp_group = pg_collection.tp
            self.in_proj = build_module(column, D, D, gather_output=False, **how)
            self.out_proj = build_module(row, D, D, input_is_parallel=True, **how)

        def forward(self, hidden_SBD):
            x_SBI, _ = self.in_proj(hidden_SBD)
            count_S11 = torch.arange(1, len(x_SBI) + 1, device=x_SBI.device, dtype=x_SBI.dtype)[:, None, None]
            return self.out_proj(x_SBI.cumsum(0) / count_S11)[0]

    class MeanBlock(Block):
        def mix(self, hidden_SBD, inputs):
            return self.mixer(hidden_SBD)

    return specs.block(MeanBlock, ModuleSpec(Mixer))


@dataclass(frozen=True)
class MeanLayer:
    in_proj: Tensor
    out_proj: Tensor


class RunningMeanDecoding(Decoding):
    def pack(self, get, model, dtype, device):
        return MeanLayer(get("in_proj.weight", dtype), get("out_proj.weight", dtype))

    def memory(self, model, batch, dtype, device):
        import torch

        return [torch.zeros(batch, model.hidden_size, device=device), torch.zeros(batch, 1, device=device)]

    def step(self, run, layer, memory, x_BD):
        total_BD, count_B1 = memory
        total_BD += run.times(x_BD, layer.in_proj)
        count_B1 += 1
        return run.times(total_BD / count_B1, layer.out_proj)

    def read(self, run, layer, memory, x_BLD, keep_BL1, reset_BL):
        import torch
        import torch.nn.functional as F

        total_BD, count_B1 = memory
        x_BLD = F.linear(x_BLD, layer.in_proj).float()
        keep_BL1 = torch.ones_like(x_BLD[..., :1]) if keep_BL1 is None else keep_BL1.float()
        totals_BLD = total_BD[:, None] + (x_BLD * keep_BL1).cumsum(1)
        counts_BL1 = count_B1[:, None] + keep_BL1.cumsum(1)
        total_BD.copy_(totals_BLD[:, -1])
        count_B1.copy_(counts_BL1[:, -1])
        return F.linear((totals_BLD / counts_BL1.clamp(min=1)).to(layer.out_proj.dtype), layer.out_proj)
