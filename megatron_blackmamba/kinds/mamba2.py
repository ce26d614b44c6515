"""Mamba-2: a causal convolution and the state-space dual (SSD) scan, and a gated norm, between two projections.

Names, shapes and row order match the Mamba-2 models of mamba-ssm and transformers.

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state.
K convolution width, W = K - 1 window, Q = I + 2GN channels of the convolution, X = I + Q + H rows of in_proj.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.costs import FP32, SMALL_KERNELS, Sizes, Work
from megatron_blackmamba.kinds.base import Decoding, Division, Inputs, LayerKind, Runner
from megatron_blackmamba.kinds.mamba import NORMS, initial_dt_bias, normed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.ops.decoding import Step
    from megatron_blackmamba.settings import ModelConfig

A_RANGE = (1.0, 16.0)
"""Initial decay rates, as in mamba-ssm."""

_FIELDS = ("heads", "head_dim", "state_size", "groups", "time_step_min")


class Mamba2(LayerKind):
    letter, name = "S", "Mamba-2"
    keys = ("mamba2", "expand", "conv_kernel", "init.dt_min", "init.dt_max", "init.dt_floor", "mamba_norms")
    block = "megatron_blackmamba.model.specs:mamba2_block"
    writes_to_residual = ("out_proj.weight",)
    kept_in_fp32 = ("A_log", "D", "dt_bias")
    elementwise = frozenset({"convolution"})
    entry = '"mamba2"'
    cut = None

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

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"mamba2": Fraction(1)}

    def part_of(self, parameter: str) -> str:
        return "mamba2"

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        I, H, GN = sizes(model)
        Q = I + 2 * GN
        return {
            "in_proj.weight": (I + Q + H, model.hidden_size),  # rows [z | x | B | C | dt]
            "conv1d.weight": (Q, 1, model.conv_kernel),  # rows [x | B | C]
            "conv1d.bias": (Q,),
            "dt_bias": (H,),
            "A_log": (H,),
            "D": (H,),
            "norm.weight": (I,),
            "out_proj.weight": (model.hidden_size, I),
            **({f"{name}.weight": (GN,) for name in NORMS[1:]} if model.mamba_norms else {}),
        }

    def readouts(self, model: ModelConfig) -> Mapping[str, Sequence[slice]]:
        """Return B and C, which all heads of a group share; heads become more with the width, so dt grows."""
        I, _, GN = sizes(model)
        return {"in_proj.weight": [slice(2 * I, 2 * I + 2 * GN)]}

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        if name == "D":
            return torch.ones(shape)
        if name == "A_log":
            return torch.empty(shape).uniform_(*A_RANGE, generator=random).log()
        if name == "dt_bias":
            return initial_dt_bias(shape, model, random)
        if name.startswith("conv1d."):
            return (torch.rand(shape, generator=random) * 2 - 1) * model.conv_kernel**-0.5
        return None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Count the scan's matrix products with the chunk length of `ops/ssd`, including the masked halves.

        The product between the states of several chunks is left out: it depends on batch and device, and is
        about 1 % of the layer on a GPU.
        """
        from megatron_blackmamba.ops.ssd.chunked import CHUNK

        D, N, G = model.hidden_size, model.mamba2.state_size, model.mamba2.groups
        I, H, GN = sizes(model)
        whole, rest = divmod(sequence, CHUNK)
        pairs = (whole * CHUNK**2 + rest**2) / sequence  # a token meets in its chunk
        return {
            "mamba2_projections": 2 * D * (2 * I + 2 * GN + H) + 2 * I * D,
            "convolution": 2 * model.conv_kernel * (I + 2 * GN),
            "ssd": round(2 * pairs * (G * N + I)) + 4 * I * N,
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        Saved are in_proj's input and output, x, B and C after the convolution, and the scan's output before and after
        the norm. One number per group of the norm, A, and a copy of the convolution's weights are saved too. Context
        parallelism adds the last inputs of the part before, the state at the start, and the decays of all parts.
        Norms of B and C keep these, their normalised values and results, and a number for each group.
        """
        I, H, GN = sizes(at.model)
        split = 2 * I + 2 * GN + H + (I + 2 * GN) + 2 * I
        each = at.whole * (at.width * split + FP32 * at.model.mamba2.groups) + 2 * FP32 * H
        each += FP32 * (at.model.conv_kernel + 1) * (I + 2 * GN)
        if at.model.mamba_norms:
            each += at.whole * max(at.width, FP32) * 2 * (2 * GN + at.model.mamba2.groups)
        if at.context > 1:
            states = FP32 * (I * at.model.mamba2.state_size + at.context * H)
            each += at.sequences * (at.width * (at.model.conv_kernel - 1) * (I + 2 * GN) + states)
        return at.here * at.width * at.model.hidden_size + each // at.tensor

    def working(self, at: Sizes) -> int:
        """Return the gradients of what it keeps, or the needs of the scan or of the gated norm."""
        from megatron_blackmamba.ops.ssd import costs

        I, H, GN = (number // at.tensor for number in sizes(at.model))
        N = at.model.mamba2.state_size
        if costs.in_triton(at, I // H, N):
            scan = costs.working_in_triton(at, I, H, GN // N, N)
        else:
            scan = costs.working(at, I, H, GN, N)
        norm = at.whole * I * (at.width + 8 * max(FP32, at.width))
        return max(self.kept(at), scan, norm)

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count projections, convolution, scan and norm where the scan runs in Triton."""
        from megatron_blackmamba.ops.ssd import costs

        I, H, GN = (number // at.tensor for number in sizes(at.model))
        D, N = at.model.hidden_size, at.model.mamba2.state_size
        if not costs.in_triton(at, I // H, N):
            return super().work(at)
        projections = [Work(at.width * at.whole * (D + X), 2 * D * X * at.whole) for X in (2 * I + 2 * GN + H, I)]
        convolved, gated = at.width * at.whole * (I + 2 * GN), at.width * at.whole * I
        forward, backward = costs.work_in_triton(at, I, N)
        forward = [*projections, Work(2 * convolved), *forward, Work(3 * gated), Work(launches=SMALL_KERNELS[0])]
        backward = [*projections, *projections, Work(4 * convolved), *backward, Work(6 * gated)]
        return forward, [*backward, Work(launches=SMALL_KERNELS[1])]

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream is gathered, scattered, and gathered again for the weight gradient.

        For each sequence, every rank of the context group also gathers the last inputs of the convolution, the state
        and, except in the backward pass, a decay for each head.
        """
        I, H, GN = sizes(at.model)
        sequences, width = at.sequences, max(at.width, FP32)
        window = at.width * (at.model.conv_kernel - 1) * (I + 2 * GN)
        passed_on = passes * (window + width * I * at.model.mamba2.state_size) + (passes - 1) * width * H
        context = at.context * sequences * passed_on / at.tensor
        return {"tensor": (2 * passes + 1) * at.stream, "context": context}

    def exported(self, model: ModelConfig) -> str:
        return "mamba2"

    def imported(self, entry: str) -> dict[str, Any] | None:
        return {} if entry == "mamba2" else None

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        fields = {f"mamba2_{field}": getattr(model.mamba2, field) for field in _FIELDS}
        return {**fields, "mamba_norms": model.mamba_norms}

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        fields = {field: content[name] for field in _FIELDS if (name := f"mamba2_{field}") in content}
        return {"mamba2": fields, "mamba_norms": content.get("mamba_norms", False)}

    def decoding(self, model: ModelConfig) -> Decoding:
        return Mamba2Decoding()


def sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Return I, H, GN."""
    heads = model.mamba2.heads or model.inner_size // model.mamba2.head_dim
    return heads * model.mamba2.head_dim, heads, model.mamba2.groups * model.mamba2.state_size


def bounded(dt: Tensor, bias_H: Tensor, least: float) -> Tensor:
    """Return dt such that softplus(dt + bias) is at least `least`."""
    if not least:
        return dt
    return dt.maximum((math.log(math.expm1(least)) - bias_H).to(dt.dtype))


@dataclass(frozen=True)
class Mamba2Layer:
    """The weights of one layer; the parameters of the recurrence are in fp32."""

    in_proj: Tensor
    conv_weight_QK: Tensor
    conv_bias_Q: Tensor
    dt_bias_H: Tensor
    A_H: Tensor
    D_H: Tensor
    norm_I: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class NormedMamba2Layer(Mamba2Layer):
    """The weights of one layer with model.mamba_norms."""

    B_norm_GN: Tensor
    C_norm_GN: Tensor


class Mamba2Decoding(Decoding):
    """The memory is the last inputs of the convolution `[B, W, Q]` and the fp32 state of the scan `[B, H, P, N]`."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> Mamba2Layer:
        weights = {
            "in_proj": get("in_proj.weight", dtype),
            "conv_weight_QK": get("conv1d.weight")[:, 0].contiguous(),
            "conv_bias_Q": get("conv1d.bias"),
            "dt_bias_H": get("dt_bias"),
            "A_H": -get("A_log").exp(),
            "D_H": get("D"),
            "norm_I": get("norm.weight"),
            "out_proj": get("out_proj.weight", dtype),
        }
        if not model.mamba_norms:
            return Mamba2Layer(**weights)
        groups = (model.mamba2.groups, -1)
        B_norm_GN, C_norm_GN = (get(f"{name}.weight").view(groups) for name in NORMS[1:])
        return NormedMamba2Layer(**weights, B_norm_GN=B_norm_GN, C_norm_GN=C_norm_GN)

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        import torch

        I, H, GN = sizes(model)
        return [
            torch.zeros(batch, model.conv_kernel - 1, I + 2 * GN, dtype=torch.float32, device=device),
            torch.zeros(batch, H, model.mamba2.head_dim, model.mamba2.state_size, dtype=torch.float32, device=device),
        ]

    def compiled(self, layer: Mamba2Layer, norm_D: Tensor, model: ModelConfig) -> Step | None:
        from megatron_blackmamba.ops.decoding import mamba2_step

        if model.mamba_norms or model.mamba2.time_step_min:
            return None
        return mamba2_step(norm_D=norm_D, **vars(layer), groups=model.mamba2.groups, eps=model.norm_eps)

    def step(self, run: Runner, layer: Mamba2Layer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.causal_conv1d import causal_conv1d_step
        from megatron_blackmamba.ops.ssd import ssd_step

        window_BWQ, state_BHPN = memory
        z_BI, xBC_BQ, dt_BH = _parts(run.times(x_BD, layer.in_proj), run.config)
        dt_BH = bounded(dt_BH, layer.dt_bias_H, run.config.mamba2.time_step_min)
        xBC_BQ = causal_conv1d_step(window_BWQ, xBC_BQ, layer.conv_weight_QK, layer.conv_bias_Q)
        x_BHP, B_BGN, C_BGN = _x_B_C(xBC_BQ, layer, run.config)
        y_BHP = ssd_step(state_BHPN, x_BHP, dt_BH, layer.A_H, B_BGN, C_BGN, layer.D_H, layer.dt_bias_H)
        return run.times(_normed(y_BHP, z_BI, layer, run.config), layer.out_proj)

    def read(self, run: Runner, layer: Mamba2Layer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
        from megatron_blackmamba.ops.matvec import product
        from megatron_blackmamba.ops.ssd import ssd

        keep_BL1, reset_BL = inputs.keep_BL1, inputs.reset_BL
        window_BWQ, state_BHPN = memory
        z_BLI, xBC_BLQ, dt_BLH = _parts(product(x_BLD, layer.in_proj), run.config)
        dt_BLH = bounded(dt_BLH, layer.dt_bias_H, run.config.mamba2.time_step_min)
        if keep_BL1 is not None:
            xBC_BLQ = xBC_BLQ * keep_BL1
        xBC_BLQ, last_window_BWQ = causal_conv1d(
            xBC_BLQ,
            layer.conv_weight_QK,
            layer.conv_bias_Q,
            initial_window=window_BWQ,
            reset_BL=reset_BL,
            return_final_window=True,
        )
        if keep_BL1 is not None:
            xBC_BLQ = xBC_BLQ * keep_BL1  # the convolution's bias alone must not feed the state at padding
        x_BLHP, B_BLGN, C_BLGN = _x_B_C(xBC_BLQ, layer, run.config)
        y_BLHP, last_state_BHPN = ssd(
            x_BLHP,
            dt_BLH,
            layer.A_H,
            B_BLGN,
            C_BLGN,
            layer.D_H,
            dt_bias_H=layer.dt_bias_H,
            initial_state_BHPN=state_BHPN,
            reset_BL=reset_BL,
            return_final_state=True,
        )
        window_BWQ.copy_(last_window_BWQ)
        state_BHPN.copy_(last_state_BHPN)
        return product(_normed(y_BLHP, z_BLI, layer, run.config), layer.out_proj)


def _parts(zxBCdt: Tensor, model: ModelConfig) -> tuple[Tensor, ...]:
    """Split in_proj's output into z, the input of the convolution, and dt."""
    I, H, GN = sizes(model)
    return zxBCdt.split([I, I + 2 * GN, H], dim=-1)


def _x_B_C(xBC: Tensor, layer: Mamba2Layer, model: ModelConfig) -> tuple[Tensor, ...]:
    I, H, GN = sizes(model)
    x, B, C = xBC.split([I, GN, GN], dim=-1)
    groups = (model.mamba2.groups, -1)
    B, C = B.unflatten(-1, groups), C.unflatten(-1, groups)
    if isinstance(layer, NormedMamba2Layer):
        B, C = normed(B, layer.B_norm_GN, model.norm_eps), normed(C, layer.C_norm_GN, model.norm_eps)
    return x.unflatten(-1, (H, -1)), B, C


def _normed(y: Tensor, z: Tensor, layer: Mamba2Layer, model: ModelConfig) -> Tensor:
    from megatron_blackmamba.ops.gated_norm import gated_rms_norm

    return gated_rms_norm(y.flatten(-2), z, layer.norm_I, model.mamba2.groups, model.norm_eps)
