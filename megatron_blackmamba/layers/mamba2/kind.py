"""Mamba-2: a causal convolution and the state-space dual (SSD) scan, and a gated norm, between two projections.

Names, shapes and row order match the Mamba-2 models of mamba-ssm and transformers.

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state.
K convolution width, W = K - 1 window, Q = I + 2GN channels of the convolution, X = I + Q + H rows of in_proj.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_blackmamba.layers.base import Division, LayerKind
from megatron_blackmamba.layers.recurrent import NORMS, RecurrentKind
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class Mamba2(RecurrentKind, LayerKind):
    letter, name = "S", "Mamba-2"
    keys = ("mamba2", "expand", "conv_kernel", "init.dt_min", "init.dt_max", "init.dt_floor", "mamba_norms")
    mixer = "megatron_blackmamba.layers.mamba2.mixer:Mamba2Mixer"
    cost = "megatron_blackmamba.layers.mamba2.cost:Mamba2Cost"
    decode = "megatron_blackmamba.layers.mamba2.decode:Mamba2Decoding"
    kept_in_fp32 = ("A_log", "D", "dt_bias")
    part, entry = "mamba2", "mamba2"
    exports = ("heads", "head_dim", "state_size", "groups", "time_step_min")
    widens = True

    def derived_fields(self, model: ModelConfig) -> dict[str, Any]:
        return {"mamba2_heads": sizes(model)[1]}

    def problems(self, model: ModelConfig) -> list[str]:
        head_dim, groups = model.mamba2.head_dim, model.mamba2.groups
        if model.mamba2.heads is None and model.inner_size % head_dim:
            inner = f"model.expand × model.hidden_size = {model.inner_size}"
            return [f"{inner} is not divisible by model.mamba2.head_dim={head_dim}: set model.mamba2.heads"]
        heads = sizes(model)[1]
        return (
            [f"the {heads} Mamba-2 heads are not divisible by model.mamba2.groups={groups}"] if heads % groups else []
        )

    def divisions(self, model: ModelConfig) -> list[Division]:
        what = "the number of Mamba-2 heads (model.mamba2.heads, or model.expand × model.hidden_size / head_dim)"
        return [
            Division(what, sizes(model)[1], "tensor"),
            Division("model.mamba2.groups", model.mamba2.groups, "tensor"),
        ]

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        I, H, GN = sizes(model)
        return {
            "in_proj.weight": in_proj(model),
            "conv1d.weight": by_rows(1, model.conv_kernel, x=I, B=GN, C=GN),
            "conv1d.bias": by_rows(x=I, B=GN, C=GN),
            "dt_bias": by_rows(heads=H),
            "A_log": by_rows(heads=H),
            "D": by_rows(heads=H),
            "norm.weight": by_rows(x=I),
            "out_proj.weight": by_columns(I, out=model.hidden_size),
            **({f"{name}.weight": by_rows(channels=GN) for name in NORMS[1:]} if model.mamba_norms else {}),
        }


def sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Return I, H, GN."""
    heads = model.mamba2.heads or model.inner_size // model.mamba2.head_dim
    return heads * model.mamba2.head_dim, heads, model.mamba2.groups * model.mamba2.state_size


def in_proj(model: ModelConfig) -> Weight:
    I, H, GN = sizes(model)
    return by_rows(model.hidden_size, z=I, x=I, B=GN, C=GN, dt=H)
