"""One token of some sequences through a whole block, norm and residual included, in a few Triton kernels.

For one sequence three kernels for a Mamba layer and two for experts or an MLP (`triton_one`): its products are bound by
the reading of weights. For several five and three, with products on tensor cores (`triton_rows`).

Shapes: B sequences, D model, I inner, N state, R rank of dt, K taps, E experts, F hidden units, G = 2F gate and up,
V vocabulary, C columns, O rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes, interpreted
from megatron_blackmamba.ops.decoding import triton_one as one
from megatron_blackmamba.ops.decoding import triton_rows as rows
from megatron_blackmamba.ops.decoding.triton_shared import choose_largest, embed, find_largest, mamba_scan

TAKES = Takes(None, FP32_OR_BF16)
MOST_ROWS = 256
"""Sequences that one launch takes; more go in parts."""
OVERLAP = True
"""Whether kernels for one sequence start while the one before runs (programmatic dependent launch, from Hopper on).

Every program of every kernel loads nothing but weights before it waits, and writes nothing. Waiting lasts until the
kernel before has ended, all its programs' waits included. So by induction all earlier kernels of the stream have ended
and their writes are visible: no buffer is read too early or overwritten too early, however early kernels start. Weights
are older than the step: its first kernel, and any of PyTorch's, starts after all before it has ended. With several
sequences no weights are loaded before the wait; there it cost 7% on an H100.
"""
PROGRAMS = 132
"""As many as an H100 has multiprocessors."""
COLUMNS = 32
"""Columns of x_proj's sums that one program adds up."""


@dataclass(frozen=True)
class Tiling:
    """The part of a product that one program takes."""

    rows: int
    """Rows of a weight; of gate and up, or of x and z, so many each."""
    block: int
    """Columns at a time."""
    warps: int
    tokens: int = 16
    """Sequences at a time."""
    stages: int = 4
    """Blocks of columns that are loaded ahead."""


ONE = {
    "in": Tiling(32, 128, 8), "out": Tiling(4, 128, 4), "head": Tiling(16, 128, 8),
    "gated": Tiling(8, 256, 8), "down": Tiling(16, 128, 4),
}  # fmt: skip
"""For one sequence: Mamba's two products, the head, and the two of an expert. Measured on an H200."""
FEW = {
    "in": Tiling(32, 128, 4), "out": Tiling(16, 256, 4), "head": Tiling(64, 128, 4),
    "gated": Tiling(32, 64, 4), "down": Tiling(32, 256, 4),
}  # fmt: skip
"""Up to 32 sequences; measured with eight. Four warps share 32 rows; of 16, two would compute the same."""
SEVERAL = {
    "in": Tiling(32, 128, 4, 32, 3), "out": Tiling(32, 128, 4, 16), "head": Tiling(128, 64, 4, 64),
    "gated": Tiling(32, 128, 4, 16, 3), "down": Tiling(32, 128, 4, 16),
}  # fmt: skip
"""Up to 128 sequences."""
MANY = {
    "in": Tiling(32, 128, 4, 64, 3), "out": Tiling(64, 128, 4, 64, 3), "head": Tiling(128, 64, 8, 128),
    "gated": Tiling(64, 64, 4, 64, 3), "down": Tiling(64, 128, 4, 64, 3),
}  # fmt: skip
"""More. An expert of eight has up to 64 of them where they spread evenly: its weights are read once."""


def tilings(B: int) -> dict[str, Tiling]:
    return ONE if B == 1 else FEW if B <= 32 else SEVERAL if B <= 128 else MANY


def unsupported(weight: Tensor) -> str | None:
    if not weight.is_cuda and not interpreted() and weight.device.type != "meta":  # where launches are counted
        return "the tensors are not on a CUDA device"
    return None if weight.is_contiguous() else "the weight is not contiguous"


class Launch:
    """The part that all launches of a step have in common: the device, and how kernels follow each other."""

    def __init__(self, like: Tensor, overlap: bool):
        self.overlap = overlap and OVERLAP and like.is_cuda and torch.cuda.get_device_capability(like.device)[0] >= 9

    def __call__(self, kernel, grid: tuple[int, ...], *tensors, tiling: Tiling, **constants) -> None:
        options = {"launch_pdl": True} if self.overlap else {}
        kernel[grid](
            *tensors, **constants, OVERLAP=self.overlap, num_warps=tiling.warps, num_stages=tiling.stages, **options
        )


class Step:
    """A block; a call takes the residual stream `[B, D]`, and what the block remembers, one token further, in place."""

    restarts = True

    def __call__(self, *moving_B: Tensor, threads: int | None = None, last_B: Tensor | None = None) -> None:
        last_B = moving_B[0].new_full((len(moving_B[0]),), -1, dtype=torch.long) if last_B is None else last_B
        with torch.cuda.device_of(last_B):
            for *parts_B, part_of_last_B in zip(*(each.split(MOST_ROWS) for each in (*moving_B, last_B)), strict=True):
                self.advance(Launch(last_B, overlap=len(part_of_last_B) == 1), part_of_last_B, *parts_B)

    def advance(self, launch: Launch, last_B: Tensor, *moving_B: Tensor) -> None:
        raise NotImplementedError


class MambaStep(Step):
    def __init__(
        self, *, norm_D: Tensor, in_proj: Tensor, conv_weight_IK: Tensor, conv_bias_I: Tensor, x_proj: Tensor,
        dt_proj_IR: Tensor, dt_bias_I: Tensor, A_IN: Tensor, D_I: Tensor, out_proj: Tensor, eps: float,
        eod: int | None = None,
    ):  # fmt: skip
        self.eod = eod
        self.norm_D, self.in_proj, self.out_proj, self.eps = norm_D, in_proj, out_proj, eps
        self.conv = conv_weight_IK, conv_bias_I
        self.x_proj, self.dt_proj_IR, self.dt_bias_I, self.A_IN, self.D_I = x_proj, dt_proj_IR, dt_bias_I, A_IN, D_I

    def advance(self, launch: Launch, last_B: Tensor, *moving_B: Tensor) -> None:
        stream_BD, window_BWI, state_BIN = moving_B
        B, D = stream_BD.shape
        (I, K), R, N = self.conv[0].shape, self.dt_proj_IR.shape[1], self.A_IN.shape[1]
        how, in_proj = tilings(B), self.in_proj
        tiling = how["in"]
        parts, M2 = cdiv(I, tiling.rows), next_power_of_2(max(COLUMNS, R + 2 * N))
        x_BI, z_BI = stream_BD.new_empty(2, B, I)
        parts_PBM = stream_BD.new_empty(parts, B, M2)
        scanned = self.dt_proj_IR, self.dt_bias_I, self.A_IN, self.D_I, state_BIN, x_BI, z_BI
        restart = last_B, 0 if self.eod is None else self.eod
        inner = {"D": D, "I": I, "K": K, "M": R + 2 * N, "M2": M2, "ROWS": tiling.rows, "BLOCK": tiling.block}
        scan = {"I": I, "N": N, "N2": next_power_of_2(N), "R": R, "R2": next_power_of_2(max(R, 16)), "M2": M2}
        for constants in (inner, scan):
            constants["RESTARTS"] = self.eod is not None
        convolved = *self.conv, self.x_proj, window_BWI, x_BI, z_BI, parts_PBM, *restart
        if B == 1:
            y_BI = stream_BD.new_empty(B, I)
            launch(
                one.mamba_in_one, (parts,), stream_BD, self.norm_D, in_proj, *convolved, self.eps, tiling=tiling,
                **inner,
            )  # fmt: skip
            launch(
                mamba_scan, (cdiv(I, 16), B), parts_PBM, *scanned, y_BI, *restart, B, tiling=Tiling(16, 0, 4),
                PARTS=parts, STEP=16, ROWS=16, **scan,
            )  # fmt: skip
        else:
            y_BI = stream_BD.new_empty(B, I, dtype=self.out_proj.dtype)
            normed_BD, _, _ = route(launch, stream_BD, self.norm_D, in_proj.dtype, self.eps)
            grid = parts, cdiv(B, tiling.tokens)
            launch(
                rows.mamba_in_rows, grid, normed_BD, in_proj, *convolved, B, tiling=tiling, TOKENS=tiling.tokens,
                **inner,
            )  # fmt: skip
            sums_BM = stream_BD.new_empty(B, M2)
            launch(
                rows.sum_parts, (B, M2 // COLUMNS), parts_PBM, sums_BM, B, tiling=Tiling(1, 0, 4), M2=M2, PARTS=parts,
                STEP=32, COLUMNS=COLUMNS,
            )  # fmt: skip
            launch(
                rows.mamba_scan_rows, (cdiv(I, 16), cdiv(B, 16)), sums_BM, *scanned, y_BI, *restart, B,
                tiling=Tiling(16, 0, 4), TOKENS=16, ROWS=16, **scan,
            )  # fmt: skip
        add_product(launch, self.out_proj, y_BI, stream_BD, how["out"])


def route(
    launch: Launch, stream_BD: Tensor, norm_D: Tensor, dtype: torch.dtype, eps: float,
    router: tuple[Tensor | None, ...] = (None, None, None), **how: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the norm of some sequences, their experts and the experts' factors; without a router the norm alone."""
    B, D = stream_BD.shape
    normed_BD = stream_BD.new_empty(B, D, dtype=dtype)
    expert_B, factor_B = stream_BD.new_empty(B, dtype=torch.int32), stream_BD.new_empty(B)
    launch(
        rows.route, (B,), stream_BD, norm_D, *router, normed_BD, expert_B, factor_B, eps, tiling=Tiling(1, 256, 4),
        D=D, BLOCK=256, **({"E": 0, "E2": 1, "BIASED": ""} | how),
    )  # fmt: skip
    return normed_BD, expert_B, factor_B


def add_product(
    launch: Launch, weight_OC: Tensor, x_BC: Tensor, y_BO: Tensor, tiling: Tiling, add: bool = True
) -> None:
    """Compute y += x @ weight.T, or without `add` y = x @ weight.T."""
    (O, C), B = weight_OC.shape, len(x_BC)
    constants = {"C": C, "O": O, "ADD": add, "ROWS": tiling.rows, "BLOCK": tiling.block}
    grid = cdiv(O, tiling.rows), cdiv(B, tiling.tokens)
    if B == 1:
        tensors = weight_OC, x_BC, y_BO, None, None
        launch(one.add_product_one, grid[:1], *tensors, tiling=tiling, ROUTED=False, **constants)
    else:
        launch(rows.add_product_rows, grid, weight_OC, x_BC, y_BO, B, tiling=tiling, TOKENS=tiling.tokens, **constants)


class ExpertsStep(Step):
    """Experts, or an MLP: then there is no router, and one expert."""

    def __init__(
        self, *, norm_D: Tensor, fc1_EGD: Tensor, fc2_EDF: Tensor, activation: str, eps: float,
        router_ED: Tensor | None = None, router_bias_E: Tensor | None = None,
        choice_bias_E: Tensor | None = None, bias_on_scores: bool = False,
    ):  # fmt: skip
        self.norm_D, self.fc1_EGD, self.fc2_EDF, self.eps = norm_D, fc1_EGD, fc2_EDF, eps
        self.gelu = {"silu": False, "gelu": True}[activation]
        self.router = router_ED, router_bias_E, choice_bias_E
        self.biased = "" if choice_bias_E is None else "scores" if bias_on_scores else "logits"

    def advance(self, launch: Launch, last_B: Tensor, *moving_B: Tensor) -> None:
        (stream_BD,) = moving_B
        B, (E, D, F), routed = len(stream_BD), self.fc2_EDF.shape, self.router[0] is not None
        how = tilings(B)
        router = {"E": E if routed else 0, "E2": next_power_of_2(E), "BIASED": self.biased}
        hidden_BF = stream_BD.new_empty(B, F, dtype=torch.float32 if B == 1 else self.fc1_EGD.dtype)
        inner, outer = ({"ROWS": t.rows, "BLOCK": t.block} for t in (how["gated"], how["down"]))
        if B == 1:
            expert_B, factor_B = stream_BD.new_empty(B, dtype=torch.int32), stream_BD.new_empty(B)
            tiles = cdiv(cdiv(F, how["gated"].rows), PROGRAMS)
            grid = (cdiv(F, how["gated"].rows * tiles),)
            launch(
                one.gated_in_one, grid, stream_BD, self.norm_D, *self.router, self.fc1_EGD, hidden_BF,
                expert_B, factor_B, self.eps, tiling=how["gated"], D=D, F=F, GELU=self.gelu, TILES=tiles,
                **router, **inner,
            )  # fmt: skip
            launch(
                one.add_product_one, (cdiv(D, how["down"].rows),), self.fc2_EDF, hidden_BF, stream_BD,
                expert_B, factor_B, tiling=how["down"], C=F, O=D, ROUTED=routed, ADD=True, **outer,
            )  # fmt: skip
            return
        normed_BD, expert_B, factor_B = route(
            launch, stream_BD, self.norm_D, self.fc1_EGD.dtype, self.eps, self.router, **router
        )
        shared = {"B2": max(16, next_power_of_2(B)), "ROUTED": routed, "D": D, "F": F}
        launch(
            rows.gated_in_rows, (cdiv(F, how["gated"].rows), E), normed_BD, self.fc1_EGD, hidden_BF, expert_B, B,
            tiling=how["gated"], TOKENS=how["gated"].tokens, GELU=self.gelu, **shared, **inner,
        )  # fmt: skip
        launch(
            rows.add_expert_rows, (cdiv(D, how["down"].rows), E), self.fc2_EDF, hidden_BF, stream_BD, expert_B,
            factor_B, B, tiling=how["down"], TOKENS=how["down"].tokens, **shared, **outer,
        )  # fmt: skip


mamba_step, experts_step = MambaStep, ExpertsStep


def mlp_step(*, norm_D: Tensor, fc1_GD: Tensor, fc2_DF: Tensor, activation: str, eps: float) -> ExpertsStep:
    return ExpertsStep(norm_D=norm_D, fc1_EGD=fc1_GD[None], fc2_EDF=fc2_DF[None], activation=activation, eps=eps)


def embedded(tokens: Tensor, embedding_VD: Tensor, multiplier: float) -> Tensor:
    """Return the residual stream before the first layer, fp32."""
    D, tokens = embedding_VD.shape[1], tokens.contiguous()
    stream = embedding_VD.new_empty(*tokens.shape, D, dtype=torch.float32)
    if tokens.numel():
        tensors = tokens, embedding_VD, stream, multiplier
        with torch.cuda.device_of(embedding_VD):
            grid = tokens.numel(), cdiv(D, 512)
            Launch(embedding_VD, overlap=False)(embed, grid, *tensors, tiling=Tiling(1, 512, 4), D=D, BLOCK=512)
    return stream


def product(x_BC: Tensor, weight_OC: Tensor) -> Tensor | None:
    """Return x @ weight.T, fp32, of up to MOST_ROWS vectors; None for others."""
    if x_BC.dim() != 2 or not 0 < len(x_BC) <= MOST_ROWS:
        return None
    y_BO = x_BC.new_empty(len(x_BC), len(weight_OC), dtype=torch.float32)
    with torch.cuda.device_of(x_BC):
        launch = Launch(x_BC, overlap=len(x_BC) == 1)
        add_product(launch, weight_OC, x_BC.contiguous(), y_BO, tilings(len(x_BC))["head"], add=False)
    return y_BO


def likeliest(logits_BV: Tensor) -> Tensor:
    """Return the token with the largest logit of each sequence, int64; -1 for one whose logits are not all finite."""
    (B, V), block = logits_BV.shape, 2048
    parts = cdiv(V, block)
    largest_BP, token_BP = logits_BV.new_empty(B, parts), logits_BV.new_empty(B, parts, dtype=torch.int32)
    token_B = logits_BV.new_empty(B, dtype=torch.long)
    with torch.cuda.device_of(logits_BV):
        launch = Launch(logits_BV, overlap=B == 1)
        launch(
            find_largest, (B, parts), logits_BV, largest_BP, token_BP, V, tiling=Tiling(1, block, 4), PARTS=parts,
            BLOCK=block,
        )  # fmt: skip
        launch(
            choose_largest, (B,), largest_BP, token_BP, token_B, tiling=Tiling(1, parts, 1), PARTS=parts,
            P2=next_power_of_2(parts),
        )  # fmt: skip
    return token_B
