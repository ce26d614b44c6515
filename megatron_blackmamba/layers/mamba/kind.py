"""Mamba-1: a causal convolution and a selective scan between two projections.

Shapes: B batch, L length, D model, I inner, N state, R rank of dt, K convolution width, W = K - 1 window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.costs import FP32, SMALL_KERNELS, Sizes, Work, kept_by_norms
from megatron_blackmamba.layers.base import Decoding, Division, Inputs, LayerKind, Runner
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.ops.decoding import Step
    from megatron_blackmamba.settings import ModelConfig


NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""With model.mamba_norms: behind x_proj, with Jamba's names. Mamba-2 has the last two, in front of its scan."""


class Mamba(LayerKind):
    letter, name = "M", "Mamba"
    keys = (
        *("state_size", "dt_rank", "expand", "conv_kernel", "mamba_norms"),
        *("init.dt_min", "init.dt_max", "init.dt_floor"),
    )
    cut = None
    widens = True
    block = "megatron_blackmamba.model.specs:mamba_block"
    by_adam = ("x_proj.weight", "dt_proj.weight")
    writes_to_residual = ("out_proj.weight",)
    kept_in_fp32 = ("A_log", "D", "dt_proj.bias")
    elementwise = frozenset({"convolution", "scan"})
    released = True
    entry = '"r"'

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [Division("the inner width (model.expand × model.hidden_size)", model.inner_size, "tensor")]

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"mamba": Fraction(1)}

    def part_of(self, parameter: str) -> str:
        return "mamba"

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        D, I, N, K, R = _sizes(model)
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

        if name == "D":
            return torch.ones(shape)
        if name == "A_log":
            return torch.log(torch.arange(1, shape[1] + 1, dtype=torch.float32)).expand(shape)
        if name == "dt_proj.bias":
            return initial_dt_bias(shape, model, random)
        fans = {"dt_proj": model.dt_rank_or_default, "conv1d": model.conv_kernel}
        if fan := fans.get(name.partition(".")[0]):
            return (torch.rand(shape, generator=random) * 2 - 1) * fan**-0.5
        return None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D, I, N, K, R = _sizes(model)
        return {
            "mamba_projections": 2 * (2 * D * I + I * (R + 2 * N) + R * I + I * D),
            "convolution": 2 * K * I,
            "scan": I * (7 * N + 4),
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        They are in_proj's input, x before and after the convolution, delta, z, y, dt, B and C, and the scan's states
        between chunks. B and C are also saved in fp32. On GPUs, states of every few tokens and y before the gate may be
        kept instead of the states between chunks. A is saved twice, and so is a copy of the convolution's weights.
        Norms keep dt, B and C as they were, in fp32, and a number for each of the three.
        """
        from megatron_blackmamba.ops.selective_scan import costs

        D, inner, N, K, R = _sizes(at.model)
        I = inner // at.tensor
        channels = at.width * 5 * I + costs.kept(at, I, N)
        shared = at.width * (R + 2 * N) + FP32 * 2 * N
        if at.model.mamba_norms:
            shared += kept_by_norms(at, R + 2 * N) + FP32 * len(NORMS)
        weights = FP32 * I * (2 * N + K + 1)
        return int(at.here * at.width * D + at.whole * (channels + shared)) + weights + self._kept_of_parts(at)

    def _kept_of_parts(self, at: Sizes) -> int:
        """Return the bytes that context parallelism adds for each sequence.

        They are the last inputs of the part before, the state at the start, and the decays of all parts.
        """
        _, inner, N, K, _ = _sizes(at.model)
        cells = at.sequences * inner // at.tensor
        return cells * (at.width * (K - 1) + FP32 * N * (1 + at.context)) if at.context > 1 else 0

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream is gathered, scattered, and gathered again for the weight gradient.

        In addition, dt, B and C are summed.
        """
        shared = at.whole * (at.model.dt_rank_or_default + 2 * at.model.state_size) * at.width
        return {"tensor": (2 * passes + 1) * at.stream + passes * 2 * shared, "context": self._passed_on(at, passes)}

    def _passed_on(self, at: Sizes, passes: int) -> float:
        """Return the traffic of the context group.

        For each sequence, every rank gathers the last inputs of the convolution, the state and, except in the backward
        pass, its decay.
        """
        _, inner, N, K, _ = _sizes(at.model)
        I, sequences = inner // at.tensor, at.sequences
        width = max(at.width, FP32)
        return at.context * sequences * I * (passes * (at.width * (K - 1) + width * N) + (passes - 1) * width * N)

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count projections, convolution and scan as the Triton kernels do them; `one` is a number for each channel."""
        from megatron_blackmamba.ops.selective_scan import costs

        D, inner, N, _, R = _sizes(at.model)
        cells = at.whole * inner // at.tensor
        one = at.width * cells
        rows = at.width * at.whole
        projections = [
            Work(rows * D + 2 * one, 4 * D * cells),
            Work(rows * (R + 2 * N) + one, 2 * (R + 2 * N) * cells),
            Work(rows * R + one, 2 * R * cells),
            Work(rows * D + one, 2 * D * cells),
        ]
        forward, backward = costs.work(at, inner // at.tensor, N)
        forward, backward = [Work(2 * one), *forward], [*backward, Work(4 * one)]  # with the convolution
        small = [Work(launches=kernels) for kernels in SMALL_KERNELS]
        return [*projections, *forward, small[0]], [*projections, *projections, *backward, small[1]]

    def paper_flops(self, model: ModelConfig, tokens: int) -> tuple[float, float] | None:
        D, I, N, K, R = _sizes(model)
        state_space = I * (11 * N + 4 * R + 1) + I * N / tokens
        return state_space, 6 * I * D + 2 * I * K + state_space

    def exported(self, model: ModelConfig) -> str:
        return "r"

    def imported(self, entry: str) -> dict[str, Any] | None:
        return {} if entry == "r" else None

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        return {"mamba_norms": model.mamba_norms}

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"mamba_norms": content.get("mamba_norms", False)}

    def decoding(self, model: ModelConfig) -> Decoding:
        return MambaDecoding()


def initial_dt_bias(shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor:
    """Return the bias whose softplus is log-uniform between model.init.dt_min and dt_max."""
    import torch

    low, high = math.log(model.init.dt_min), math.log(model.init.dt_max)
    dt = torch.exp(torch.rand(shape, generator=random) * (high - low) + low).clamp(min=model.init.dt_floor)
    return dt + torch.log(-torch.expm1(-dt))


def x_proj(model: ModelConfig) -> Weight:
    """Return the matrix whose outputs all channels share."""
    return by_columns(model.inner_size, dt=model.dt_rank_or_default, B=model.state_size, C=model.state_size)


def _sizes(model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Return D, I, N, K, R."""
    return model.hidden_size, model.inner_size, model.state_size, model.conv_kernel, model.dt_rank_or_default


@dataclass(frozen=True)
class MambaLayer:
    """The weights of one layer. The recurrence's own parameters are fp32 whatever the rest is."""

    in_proj: Tensor
    conv_weight_IK: Tensor
    conv_bias_I: Tensor
    x_proj: Tensor
    dt_proj_IR: Tensor
    dt_bias_I: Tensor
    A_IN: Tensor
    D_I: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class NormedMambaLayer(MambaLayer):
    """The weights of one layer with model.mamba_norms."""

    dt_norm_R: Tensor
    B_norm_N: Tensor
    C_norm_N: Tensor


class MambaDecoding(Decoding):
    """The memory is the last inputs of the convolution `[B, W, I]` and the fp32 state of the scan `[B, I, N]`."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> MambaLayer:
        weights = {
            "in_proj": get("in_proj.weight", dtype),
            "conv_weight_IK": get("conv1d.weight")[:, 0].contiguous(),
            "conv_bias_I": get("conv1d.bias"),
            "x_proj": get("x_proj.weight", dtype),
            "dt_proj_IR": get("dt_proj.weight", dtype),
            "dt_bias_I": get("dt_proj.bias"),
            "A_IN": -get("A_log").exp(),
            "D_I": get("D"),
            "out_proj": get("out_proj.weight", dtype),
        }
        if not model.mamba_norms:
            return MambaLayer(**weights)
        dt_norm_R, B_norm_N, C_norm_N = (get(f"{name}.weight") for name in NORMS)
        return NormedMambaLayer(**weights, dt_norm_R=dt_norm_R, B_norm_N=B_norm_N, C_norm_N=C_norm_N)

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        import torch

        _, I, N, K, _ = _sizes(model)
        return [
            torch.zeros(batch, K - 1, I, dtype=torch.float32, device=device),
            torch.zeros(batch, I, N, dtype=torch.float32, device=device),
        ]

    def compiled(self, layer: MambaLayer, norm_D: Tensor, model: ModelConfig) -> Step | None:
        from megatron_blackmamba.ops.decoding import mamba_step

        if model.mamba_norms:
            return None
        return mamba_step(norm_D=norm_D, **vars(layer), eps=model.norm_eps, eod=model.eod_reset)

    def step(self, run: Runner, layer: MambaLayer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.causal_conv1d import causal_conv1d_step
        from megatron_blackmamba.ops.selective_scan import selective_scan_step

        window_BWI, state_BIN = memory
        x_BI, z_BI = run.times(x_BD, layer.in_proj).chunk(2, dim=-1)
        x_BI = causal_conv1d_step(window_BWI, x_BI, layer.conv_weight_IK, layer.conv_bias_I)
        dt_BR, B_BN, C_BN = _dt_B_C(run.times(x_BI, layer.x_proj), layer, run.config)
        y_BI = selective_scan_step(
            state_BIN,
            x_BI,
            run.times(dt_BR, layer.dt_proj_IR),
            layer.A_IN,
            B_BN,
            C_BN,
            layer.D_I,
            z_BI,
            layer.dt_bias_I,
        )
        return run.times(y_BI, layer.out_proj)

    def read(self, run: Runner, layer: MambaLayer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
        from megatron_blackmamba.ops.matvec import product
        from megatron_blackmamba.ops.selective_scan import selective_scan

        keep_BL1, reset_BL = inputs.keep_BL1, inputs.reset_BL
        window_BWI, state_BIN = memory
        x_BLI, z_BLI = product(x_BLD, layer.in_proj).chunk(2, dim=-1)
        if keep_BL1 is not None:
            x_BLI = x_BLI * keep_BL1
        x_BLI, last_window_BWI = causal_conv1d(
            x_BLI,
            layer.conv_weight_IK,
            layer.conv_bias_I,
            initial_window=window_BWI,
            reset_BL=reset_BL,
            return_final_window=True,
        )
        if keep_BL1 is not None:
            x_BLI = x_BLI * keep_BL1  # the convolution's bias alone must not feed the state at padding
        dt_BLR, B_BLN, C_BLN = _dt_B_C(product(x_BLI, layer.x_proj), layer, run.config)
        y_BLI, last_state_BIN = selective_scan(
            x_BLI,
            product(dt_BLR, layer.dt_proj_IR),
            layer.A_IN,
            B_BLN,
            C_BLN,
            layer.D_I,
            z_BLI=z_BLI,
            delta_bias_I=layer.dt_bias_I,
            initial_state_BIN=state_BIN,
            reset_BL=reset_BL,
            return_final_state=True,
        )
        window_BWI.copy_(last_window_BWI)
        state_BIN.copy_(last_state_BIN)
        return product(y_BLI, layer.out_proj)


def _dt_B_C(x: Tensor, layer: MambaLayer, model: ModelConfig) -> tuple[Tensor, ...]:
    dt, B, C = x_proj(model).split(x)
    if not isinstance(layer, NormedMambaLayer):
        return dt, B, C
    weights = (layer.dt_norm_R, layer.B_norm_N, layer.C_norm_N)
    return tuple(normed(part, weight, model.norm_eps) for part, weight in zip((dt, B, C), weights, strict=True))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over as many channels as the last axis of the weight has, in x's dtype."""
    import torch.nn.functional as F

    return (F.rms_norm(x.float(), weight.shape[-1:], None, eps) * weight).to(x.dtype)
