"""Mamba-1: a causal convolution and a selective scan between two projections.

Shapes: B batch, L length, D model, I inner, N state, R rank of dt, K convolution width, W = K - 1 window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.layers.base import Division, LayerKind
from megatron_blackmamba.layers.recurrent import NORMS, RecurrentKind, initial_dt_bias
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig


class Mamba(RecurrentKind, LayerKind):
    letter, name = "M", "Mamba"
    keys = (
        *("state_size", "dt_rank", "expand", "conv_kernel", "mamba_norms"),
        *("init.dt_min", "init.dt_max", "init.dt_floor"),
    )
    widens = True
    mixer = "megatron_blackmamba.layers.mamba.mixer:MambaMixer"
    cost = "megatron_blackmamba.layers.mamba.cost:MambaCost"
    decode = "megatron_blackmamba.layers.mamba.decode:MambaDecoding"
    by_adam = ("x_proj.weight", "dt_proj.weight")
    kept_in_fp32 = ("A_log", "D", "dt_proj.bias")
    released = True
    part, entry = "mamba", "r"

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [Division("the inner width (model.expand × model.hidden_size)", model.inner_size, "tensor")]

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        D, I, N, K, R = sizes(model)
        norms = {f"{name}.weight": whole(channels=size) for name, size in zip(NORMS, (R, N, N), strict=True)}
        return {
            "in_proj.weight": by_rows(D, x=I, z=I),
            "conv1d.weight": by_rows(1, K, x=I),
            "conv1d.bias": by_rows(x=I),
            "x_proj.weight": x_proj(model),
            "dt_proj.weight": by_rows(R, x=I),
            "dt_proj.bias": by_rows(x=I),
            "A_log": by_rows(N, x=I),
            "D": by_rows(x=I),
            "out_proj.weight": by_columns(I, out=D),
            **(norms if model.mamba_norms else {}),
        }

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        if name == "A_log":
            return torch.log(torch.arange(1, shape[1] + 1, dtype=torch.float32)).expand(shape)
        if name == "dt_proj.bias":
            return initial_dt_bias(shape, model, random)
        if name == "dt_proj.weight":
            return (torch.rand(shape, generator=random) * 2 - 1) * model.dt_rank_or_default**-0.5
        return super().initial(name, shape, model, random)


def x_proj(model: ModelConfig) -> Weight:
    """Return the matrix whose outputs all channels share."""
    return by_columns(model.inner_size, dt=model.dt_rank_or_default, B=model.state_size, C=model.state_size)


def sizes(model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Return D, I, N, K, R."""
    return model.hidden_size, model.inner_size, model.state_size, model.conv_kernel, model.dt_rank_or_default
