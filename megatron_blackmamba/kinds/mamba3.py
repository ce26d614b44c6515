"""Mamba-3: two tokens write a state by the trapezoidal rule, and B and C turn, between two projections.

It has no convolution. Names, shapes and row order match `mamba_ssm.modules.mamba3` with one input and one output a head
(SISO).

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state, S angles.
X = 2I + 2GN + 3H + S rows of in_proj.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.costs import FP32, Sizes
from megatron_blackmamba.kinds.base import Decoding, Division, Inputs, LayerKind, Runner
from megatron_blackmamba.kinds.mamba import initial_dt_bias, normed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.ops.mamba3 import Rates
    from megatron_blackmamba.settings import ModelConfig

BIASES = ("dt_bias", "B_bias", "C_bias")
NORMS = ("B_norm", "C_norm")
_FIELDS = ("head_dim", "state_size", "groups", "rope_fraction", "a_floor", "output_norm")


class Mamba3(LayerKind):
    letter, name = "R", "Mamba-3"
    keys = ("mamba3", "expand", "init.dt_min", "init.dt_max", "init.dt_floor")
    block = "megatron_blackmamba.model.specs:mamba3_block"
    writes_to_residual = ("out_proj.weight",)
    kept_in_fp32 = (*BIASES, "D")
    elementwise = frozenset({"rotations"})
    entry = '"mamba3"'
    cut = None

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

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"mamba3": Fraction(1)}

    def part_of(self, parameter: str) -> str:
        return "mamba3"

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        I, N = model.inner_size, model.mamba3.state_size
        H = I // model.mamba3.head_dim
        return {
            "in_proj.weight": (sum(rows(model)), model.hidden_size),  # rows [z | x | B | C | dt | A | trap | angle]
            "dt_bias": (H,),
            "B_bias": (H, 1, N),
            "C_bias": (H, 1, N),
            "D": (H,),
            **{f"{name}.weight": (N,) for name in NORMS},
            **({"norm.weight": (I,)} if model.mamba3.output_norm else {}),
            "out_proj.weight": (model.hidden_size, I),
        }

    def readouts(self, model: ModelConfig) -> Mapping[str, Sequence[slice]]:
        """Return B and C, which all heads of a group share, and the angles, which all heads share."""
        I, GN, _, S = _sizes(model)
        return {"in_proj.weight": [slice(2 * I, 2 * I + 2 * GN), slice(-S, None)]}

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        if name in ("D", "B_bias", "C_bias"):
            return torch.ones(shape)
        return initial_dt_bias(shape, model, random) if name == "dt_bias" else None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Count the scan's matrix products with the chunk length of `ops/ssd`, including the masked halves.

        B and C differ by head, so each head has products of its own between tokens.
        """
        from megatron_blackmamba.ops.ssd.chunked import CHUNK

        D, I, N = model.hidden_size, model.inner_size, model.mamba3.state_size
        H = I // model.mamba3.head_dim
        whole, rest = divmod(sequence, CHUNK)
        pairs = (whole * CHUNK**2 + rest**2) / sequence  # a token meets in its chunk
        return {
            "mamba3_projections": 2 * D * sum(rows(model)) + 2 * I * D,
            "rotations": 2 * 6 * H * angles(model),
            "ssd": round(2 * pairs * (H * N + I)) + 4 * I * N,
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        The projections save in_proj's input and output. The norms save B and C, and their results. `Rates.of` saves
        ten numbers of a head, and the angles. The gate saves the scan's output, both factors and their product. Context
        parallelism adds the state at the start and the decays of all parts.
        """
        I, GN, H, S = _sizes(at.model)
        width, wide = at.width, max(at.width, FP32)
        copies = 1 if width == wide else 2  # a norm keeps its input in fp32
        each = width * (sum(rows(at.model)) + 3 * I + 2 * GN)
        each += wide * (10 * H + S + H * S + copies * 2 * GN + 2 * at.model.mamba3.groups)
        if at.model.mamba3.output_norm:
            each += width * I + wide * (copies * I + H)
        start = FP32 * (I * at.model.mamba3.state_size + at.context * H) if at.context > 1 else 0
        return at.here * width * at.model.hidden_size + (at.whole * each + at.sequences * start) // at.tensor

    def working(self, at: Sizes) -> int:
        """Return the gradients of what it keeps, or the memory of the scan, in which each head has its own B and C."""
        from megatron_blackmamba.ops.ssd import costs

        I, _, H, _ = (number // at.tensor for number in _sizes(at.model))
        N = at.model.mamba3.state_size
        return max(self.kept(at), costs.working(at, I, H, H * N, N))

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream as in Mamba-2, and for each sequence the state, decays and sums of angles."""
        I, _, H, S = _sizes(at.model)
        wide = max(at.width, FP32)
        passed_on = passes * wide * (I * at.model.mamba3.state_size + H + 2 * H * S) + (passes - 1) * wide * H
        angle_rows = passes * at.whole * at.width * S
        return {
            "tensor": (2 * passes + 1) * at.stream + angle_rows,
            "context": at.context * at.sequences * passed_on / at.tensor,
        }

    def exported(self, model: ModelConfig) -> str:
        return "mamba3"

    def imported(self, entry: str) -> dict[str, Any] | None:
        return {} if entry == "mamba3" else None

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        return {f"mamba3_{field}": getattr(model.mamba3, field) for field in _FIELDS}

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {"mamba3": {field: content[name] for field in _FIELDS if (name := f"mamba3_{field}") in content}}

    def decoding(self, model: ModelConfig) -> Decoding:
        return Mamba3Decoding()


def angles(model: ModelConfig) -> int:
    """Return S, the number of pairs of a state that turn."""
    return int(model.mamba3.state_size * model.mamba3.rope_fraction) // 2


def rows(model: ModelConfig) -> list[int]:
    """Return the rows of in_proj: z, x, B, C, dt, A, trap, angle."""
    I, GN, H, S = _sizes(model)
    return [I, I, GN, GN, H, H, H, S]


def _sizes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return I, GN, H, S."""
    I = model.inner_size
    return I, model.mamba3.groups * model.mamba3.state_size, I // model.mamba3.head_dim, angles(model)


@dataclass(frozen=True)
class Mamba3Layer:
    """The weights of one layer; the parameters of the recurrence are in fp32."""

    in_proj: Tensor
    dt_bias_H: Tensor
    B_bias_HN: Tensor
    C_bias_HN: Tensor
    D_H: Tensor
    B_norm_N: Tensor
    C_norm_N: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class NormedMamba3Layer(Mamba3Layer):
    """The weights of one layer with model.mamba3.output_norm."""

    norm_I: Tensor


class Mamba3Decoding(Decoding):
    """The memory is that of `ops/mamba3`: the sum of angles, the state, and the last token's B and x, all fp32."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> Mamba3Layer:
        weights = {
            "in_proj": get("in_proj.weight", dtype),
            "dt_bias_H": get("dt_bias"),
            "B_bias_HN": get("B_bias")[:, 0].contiguous(),
            "C_bias_HN": get("C_bias")[:, 0].contiguous(),
            "D_H": get("D"),
            "B_norm_N": get("B_norm.weight"),
            "C_norm_N": get("C_norm.weight"),
            "out_proj": get("out_proj.weight", dtype),
        }
        if model.mamba3.output_norm:
            return NormedMamba3Layer(**weights, norm_I=get("norm.weight"))
        return Mamba3Layer(**weights)

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        import torch

        _, _, H, S = _sizes(model)
        P, N = model.mamba3.head_dim, model.mamba3.state_size
        shapes = ((H, S), (H, P, N), (H, N), (H, P))
        return [torch.zeros(batch, *shape, dtype=torch.float32, device=device) for shape in shapes]

    def step(self, run: Runner, layer: Mamba3Layer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.mamba3 import Memory, mamba3_step

        z_BI, x_BHP, B_BGN, C_BGN, rates = _parts(run.times(x_BD, layer.in_proj), layer, run.config)
        how = (layer.B_bias_HN, layer.C_bias_HN, layer.D_H)
        y_BHP = mamba3_step(Memory(*memory), x_BHP, rates, B_BGN, C_BGN, *how)
        return run.times(_gated(y_BHP, z_BI, layer, run.config), layer.out_proj)

    def read(self, run: Runner, layer: Mamba3Layer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.mamba3 import Memory, mamba3
        from megatron_blackmamba.ops.matvec import product

        z_BLI, x_BLHP, B_BLGN, C_BLGN, rates = _parts(product(x_BLD, layer.in_proj), layer, run.config)
        if inputs.keep_BL1 is not None:
            x_BLHP = x_BLHP * inputs.keep_BL1[..., None]
        how = (layer.B_bias_HN, layer.C_bias_HN, layer.D_H)
        y_BLHP, after = mamba3(
            x_BLHP, rates, B_BLGN, C_BLGN, *how, memory=Memory(*memory), reset_BL=inputs.reset_BL
        )  # fmt: skip
        assert after is not None
        for kept, new in zip(memory, after, strict=True):
            kept.copy_(new)
        return product(_gated(y_BLHP, z_BLI, layer, run.config), layer.out_proj)


def _parts(projected: Tensor, layer: Mamba3Layer, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Rates]:
    """Split in_proj's output into z, x, B, C and the rates."""
    from megatron_blackmamba.ops.mamba3 import Rates

    z, x, B, C, dt, A, trap, angle = projected.split(rows(model), dim=-1)
    groups = (model.mamba3.groups, -1)
    B = normed(B.unflatten(-1, groups), layer.B_norm_N, model.norm_eps)
    C = normed(C.unflatten(-1, groups), layer.C_norm_N, model.norm_eps)
    rates = Rates.of(dt, A, trap, angle, layer.dt_bias_H, model.mamba3.a_floor)
    return z, x.unflatten(-1, (-1, model.mamba3.head_dim)), B, C, rates


def _gated(y: Tensor, z: Tensor, layer: Mamba3Layer, model: ModelConfig) -> Tensor:
    import torch.nn.functional as F

    if isinstance(layer, NormedMamba3Layer):
        y = normed(y, layer.norm_I.view(y.shape[-2:]), model.norm_eps)
    return y.flatten(-2) * F.silu(z)
