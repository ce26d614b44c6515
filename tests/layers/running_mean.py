"""A layer kind in one file, as somebody else would add it: the mean of all tokens so far, between two projections."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from megatron_blackmamba.layers import Cannot, Decoding, Division, LayerKind, by_columns, by_rows

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

    def weights(self, model):
        D = model.hidden_size
        return {"in_proj.weight": by_rows(D, x=D), "gain": by_rows(x=D), "out_proj.weight": by_columns(D, out=D)}

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
    return block_of(kernels, 1, mean)


def mean(mixer, product_SBI, reset_BS):
    import torch

    x_BSI = product_SBI.transpose(0, 1).to(mixer.config.full_precision)
    mean_BSI = sums(x_BSI, reset_BS) / sums(torch.ones_like(x_BSI[..., :1]), reset_BS)
    return mean_BSI.to(product_SBI.dtype) * mixer.gain


def block_of(kernels, parts, compute):
    """The spec of a block with as many parts of D rows in its first matrix."""
    from megatron_blackmamba.model import specs
    from megatron_blackmamba.model.linears import column, row
    from megatron_blackmamba.model.sharding import empty, without_decay
    from megatron_blackmamba.model.stack import Block

    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec

    first, last = specs.linears(kernels.linear)

    class Mixer(MegatronModule):
        def __init__(self, config, layer_number, pg_collection):
            super().__init__(config)
            D, tp_group = config.hidden_size, pg_collection.tp
            self.gain = without_decay(empty(D // tp_group.size(), dtype=config.params_dtype))  # of this rank
            self.in_proj = column(first, D, parts * D, config, tp_group)
            self.out_proj = row(last, D, D, config, tp_group)

        def forward(self, hidden_SBD, reset_BS):
            y_BSI = compute(self, self.in_proj(hidden_SBD)[0], reset_BS)
            return self.out_proj(y_BSI.transpose(0, 1).contiguous())[0]

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
