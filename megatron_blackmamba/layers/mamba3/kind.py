"""Mamba-3: two tokens write a state by the trapezoidal rule, and B and C turn, between two projections.

It has no convolution. Names, shapes and row order match `mamba_ssm.modules.mamba3`, with one input and output of a head
for each token (SISO) or several (MIMO).

Shapes: B batch, L length, D model, I inner, H heads, P channels of a head, G groups, N state, S angles, R rank.
X = 2I + 2RGN + 3H + S rows of in_proj.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.costs import FP32, Sizes, Work
from megatron_blackmamba.layers.base import Decoding, Division, Inputs, LayerKind, Runner
from megatron_blackmamba.layers.mamba.kind import initial_dt_bias, normed
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.ops.mamba3 import Rates
    from megatron_blackmamba.settings import ModelConfig

BIASES = ("dt_bias", "B_bias", "C_bias")
NORMS = ("B_norm", "C_norm")
MIX = ("mimo_x", "mimo_z", "mimo_o")
"""Factors of R inputs, gates and outputs."""
_FIELDS = ("head_dim", "state_size", "groups", "rope_fraction", "rank", "a_floor", "output_norm")


class Mamba3(LayerKind):
    letter, name = "R", "Mamba-3"
    keys = ("mamba3", "expand", "init.dt_min", "init.dt_max", "init.dt_floor")
    block = "megatron_blackmamba.model.specs:mamba3_block"
    writes_to_residual = ("out_proj.weight",)
    kept_in_fp32 = (*BIASES, "D", *MIX)
    elementwise = frozenset({"rotations"})
    entry = '"mamba3"'
    cut = None
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

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"mamba3": Fraction(1)}

    def part_of(self, parameter: str) -> str:
        return "mamba3"

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

        if name in ("D", "B_bias", "C_bias", "mimo_z"):
            return torch.ones(shape)
        if name in MIX:
            return torch.full(shape, 1 / model.mamba3.rank)
        return initial_dt_bias(shape, model, random) if name == "dt_bias" else None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Count the scan's matrix products with the chunk length of `ops/ssd`, including the masked halves.

        B and C differ by head, so each head has products of its own between rows of B and C.
        """
        from megatron_blackmamba.ops.ssd.chunked import CHUNK

        D, I, N, R = model.hidden_size, model.inner_size, model.mamba3.state_size, model.mamba3.rank
        H, chunk = I // model.mamba3.head_dim, max(1, CHUNK // R)
        whole, rest = divmod(sequence, chunk)
        pairs = R * R * (whole * chunk**2 + rest**2) / sequence  # of rows, for each token
        return {
            "mamba3_projections": 2 * D * in_proj(model).shape[0] + 2 * I * D,
            "rotations": 2 * 6 * R * H * angles(model),
            "ssd": round(2 * pairs * (H * N + I)) + 4 * R * I * N,
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        The projections save in_proj's input and output. The norms save B and C, and their results. `Rates.of` saves
        nine numbers of a head, and the angles twice. The gate saves the scan's output, both factors and their product;
        with several outputs, for each of them in fp32, and z too. Context parallelism adds the state at the start and
        the decays of all parts.
        """
        (I, RGN, H, S), R = _sizes(at.model), at.model.mamba3.rank
        width, wide = at.width, max(at.width, FP32)
        copies = 1 if width == wide else 2  # a norm keeps its input in fp32
        each = width * (in_proj(at.model).shape[0] + (1 + R) * I + 2 * RGN)
        each += width * I if R == 1 else wide * (3 * R + copies - 1) * I
        each += wide * (9 * H + 2 * S + H * S + copies * 2 * RGN + 2 * R * at.model.mamba3.groups)
        if at.model.mamba3.output_norm:
            each += R * (width * I + wide * (copies * I + H))
        start = FP32 * (I * at.model.mamba3.state_size + at.context * H) if at.context > 1 else 0
        return at.here * width * at.model.hidden_size + (at.whole * each + at.sequences * start) // at.tensor

    def working(self, at: Sizes) -> int:
        """Return the gradients of what it keeps, or the memory of the scan, in which each head has its own B and C."""
        from megatron_blackmamba.ops.ssd import costs

        I, _, H, _ = (number // at.tensor for number in _sizes(at.model))
        N, R = at.model.mamba3.state_size, at.model.mamba3.rank
        return max(self.kept(at), costs.working(at, I, H, H * N, N, R))

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count the projections, and how often PyTorch's operations between them read and write."""
        from megatron_blackmamba.ops.ssd import costs

        D, (I, _, H, S), N = at.model.hidden_size, _sizes(at.model), at.model.mamba3.state_size
        projections = [
            Work(at.width * at.whole * (D + size // at.tensor), 2 * D * size * at.whole // at.tensor)
            for size in (in_proj(at.model).shape[0], I)
        ]
        there, back = costs.passes(at, I // at.tensor, H // at.tensor, N, S, at.model.mamba3.rank)
        return [*projections, there], [*projections, *projections, back]

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


def in_proj(model: ModelConfig) -> Weight:
    """Return the matrix in front of the scan; each of the R ranks of B and C is split by itself."""
    I, RGN, H, S = _sizes(model)
    ranks = (RGN // model.mamba3.rank,) * model.mamba3.rank
    return by_rows(model.hidden_size, z=I, x=I, B=ranks, C=ranks, dt=H, A=H, trap=H, angle=S)


def _sizes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return I, RGN, H, S."""
    I, mamba3 = model.inner_size, model.mamba3
    return I, mamba3.rank * mamba3.groups * mamba3.state_size, I // mamba3.head_dim, angles(model)


@dataclass(frozen=True)
class Mamba3Layer:
    """The weights of one layer; the parameters of the recurrence are in fp32."""

    in_proj: Tensor
    dt_bias_H: Tensor
    B_bias_HRN: Tensor
    C_bias_HRN: Tensor
    D_H: Tensor
    B_norm_N: Tensor
    C_norm_N: Tensor
    out_proj: Tensor
    norm_I: Tensor | None
    """With model.mamba3.output_norm."""
    x_HRP: Tensor | None
    """Factors of inputs, gates and outputs, with model.mamba3.rank above 1."""
    z_HRP: Tensor | None
    o_HRP: Tensor | None


class Mamba3Decoding(Decoding):
    """The memory is that of `ops/mamba3`: the sum of angles, the state, and the last token's B and x, all fp32."""

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> Mamba3Layer:
        x_HRP, z_HRP, o_HRP = (get(name) if model.mamba3.rank > 1 else None for name in MIX)
        return Mamba3Layer(
            in_proj=get("in_proj.weight", dtype),
            dt_bias_H=get("dt_bias"),
            B_bias_HRN=get("B_bias"),
            C_bias_HRN=get("C_bias"),
            D_H=get("D"),
            B_norm_N=get("B_norm.weight"),
            C_norm_N=get("C_norm.weight"),
            out_proj=get("out_proj.weight", dtype),
            norm_I=get("norm.weight") if model.mamba3.output_norm else None,
            x_HRP=x_HRP,
            z_HRP=z_HRP,
            o_HRP=o_HRP,
        )

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        import torch

        _, _, H, S = _sizes(model)
        P, N, R = model.mamba3.head_dim, model.mamba3.state_size, model.mamba3.rank
        shapes = ((H, S), (H, P, N), (H, R, N), (H, P))
        return [torch.zeros(batch, *shape, dtype=torch.float32, device=device) for shape in shapes]

    def step(self, run: Runner, layer: Mamba3Layer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.mamba3 import Memory, mamba3_step

        z_BI, x_BHP, B_BRGN, C_BRGN, rates = _parts(run.times(x_BD, layer.in_proj), layer, run.config)
        how = (layer.B_bias_HRN, layer.C_bias_HRN, layer.D_H, layer.x_HRP)
        y = mamba3_step(Memory(*memory), x_BHP, rates, B_BRGN, C_BRGN, *how)
        return run.times(_gated(y, z_BI, layer, run.config), layer.out_proj)

    def read(self, run: Runner, layer: Mamba3Layer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.mamba3 import Memory, mamba3
        from megatron_blackmamba.ops.matvec import product

        z_BLI, x_BLHP, B_BLRGN, C_BLRGN, rates = _parts(product(x_BLD, layer.in_proj), layer, run.config)
        if inputs.keep_BL1 is not None:
            x_BLHP = x_BLHP * inputs.keep_BL1[..., None]
        how = (layer.B_bias_HRN, layer.C_bias_HRN, layer.D_H)
        last, mix_HRP = Memory(*memory), layer.x_HRP
        y, after = mamba3(
            x_BLHP, rates, B_BLRGN, C_BLRGN, *how, mix_HRP=mix_HRP, memory=last, reset_BL=inputs.reset_BL
        )  # fmt: skip
        assert after is not None
        for kept, new in zip(memory, after, strict=True):
            kept.copy_(new)
        return product(_gated(y, z_BLI, layer, run.config), layer.out_proj)


def _parts(projected: Tensor, layer: Mamba3Layer, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Rates]:
    """Split in_proj's output into z, x, B, C and the rates."""
    from megatron_blackmamba.ops.mamba3 import Rates

    z, x, B, C, dt, A, trap, angle = in_proj(model).split(projected)
    groups = (model.mamba3.rank, model.mamba3.groups, -1)
    B = normed(B.unflatten(-1, groups), layer.B_norm_N, model.norm_eps)
    C = normed(C.unflatten(-1, groups), layer.C_norm_N, model.norm_eps)
    rates = Rates.of(dt, A, trap, angle, layer.dt_bias_H, model.mamba3.a_floor)
    return z, x.unflatten(-1, (-1, model.mamba3.head_dim)), B, C, rates


def _gated(y: Tensor, z: Tensor, layer: Mamba3Layer, model: ModelConfig) -> Tensor:
    from megatron_blackmamba.ops.mamba3 import gated

    if layer.norm_I is not None:
        y = normed(y, layer.norm_I.view(y.shape[-2:]), model.norm_eps)
    return gated(y, z, layer.z_HRP, layer.o_HRP)
