"""Mamba-3: two tokens write a state by the trapezoidal rule, and B and C turn, between two projections.

It has no convolution. Names, shapes and row order match `mamba_ssm.modules.mamba3`, with one input and output of a head
for each token (SISO) or several (MIMO).

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state, S angles, R rank.
X = 2I + 2RGN + 3H + S rows of in_proj.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.layers.base import Division, LayerKind
from megatron_blackmamba.layers.recurrent import RecurrentKind
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig

BIASES = ("dt_bias", "B_bias", "C_bias")
NORMS = ("B_norm", "C_norm")
MIX = ("mimo_x", "mimo_z", "mimo_o")
"""Factors of R inputs, gates and outputs."""


class Mamba3(RecurrentKind, LayerKind):
    letter, name = "R", "Mamba-3"
    keys = ("mamba3", "expand", "init.dt_min", "init.dt_max", "init.dt_floor")
    mixer = "megatron_blackmamba.layers.mamba3.mixer:Mamba3Mixer"
    cost = "megatron_blackmamba.layers.mamba3.cost:Mamba3Cost"
    decode = "megatron_blackmamba.layers.mamba3.decode:Mamba3Decoding"
    kept_in_fp32 = (*BIASES, "D", *MIX)
    part, entry = "mamba3", "mamba3"
    exports = ("head_dim", "state_size", "groups", "rope_fraction", "rank", "a_floor", "output_norm")
    widens = True

    def problems(self, model: ModelConfig) -> list[str]:
        head_dim, groups = model.mamba3.head_dim, model.mamba3.groups
        if model.inner_size % head_dim:
            inner = f"model.expand × model.hidden_size = {model.inner_size}"
            return [f"{inner} is not divisible by model.mamba3.head_dim={head_dim}"]
        heads, found = model.inner_size // head_dim, []
        if heads % groups:
            found.append(f"the {heads} Mamba-3 heads are not divisible by model.mamba3.groups={groups}")
        if model.mamba3.state_size % 2 or not angles(model):
            found.append(f"model.mamba3.state_size={model.mamba3.state_size} must be even, with a pair that turns")
        return found

    def divisions(self, model: ModelConfig) -> list[Division]:
        what = "the number of Mamba-3 heads (model.expand × model.hidden_size / model.mamba3.head_dim)"
        return [
            Division(what, model.inner_size // model.mamba3.head_dim, "tensor"),
            Division("model.mamba3.groups", model.mamba3.groups, "tensor"),
            Division("the angles (model.mamba3.state_size × rope_fraction / 2)", angles(model), "tensor"),
        ]

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        I, N, R = model.inner_size, model.mamba3.state_size, model.mamba3.rank
        H = I // model.mamba3.head_dim
        return {
            "in_proj.weight": in_proj(model),
            "dt_bias": by_rows(heads=H),
            "B_bias": by_rows(R, N, heads=H),
            "C_bias": by_rows(R, N, heads=H),
            "D": by_rows(heads=H),
            **(dict.fromkeys(MIX, by_rows(R, model.mamba3.head_dim, heads=H)) if R > 1 else {}),
            **{f"{name}.weight": whole(channels=N) for name in NORMS},
            **({"norm.weight": by_rows(x=I)} if model.mamba3.output_norm else {}),
            "out_proj.weight": by_columns(I, out=model.hidden_size),
        }

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        if name in ("B_bias", "C_bias", "mimo_z"):
            return torch.ones(shape)
        if name in MIX:
            return torch.full(shape, 1 / model.mamba3.rank)
        return super().initial(name, shape, model, random)


def angles(model: ModelConfig) -> int:
    """Return S, the number of pairs of a state that turn."""
    return int(model.mamba3.state_size * model.mamba3.rope_fraction) // 2


def in_proj(model: ModelConfig) -> Weight:
    """Return the matrix in front of the scan; each of the R ranks of B and C is split by itself."""
    I, RGN, H, S = sizes(model)
    ranks = (RGN // model.mamba3.rank,) * model.mamba3.rank
    return by_rows(model.hidden_size, z=I, x=I, B=ranks, C=ranks, dt=H, A=H, trap=H, angle=S)


def sizes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return I, RGN, H, S."""
    I, mamba3 = model.inner_size, model.mamba3
    return I, mamba3.rank * mamba3.groups * mamba3.state_size, I // mamba3.head_dim, angles(model)
