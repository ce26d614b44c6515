"""One token of a few sequences through a whole block in C++ (csrc/decoding.cpp).

Shapes: B sequences, D model, I inner, W window, K = W + 1 taps, N state, R rank of dt, E experts, F expert hidden,
G = 2F gate and up. For Mamba-2: H heads, P channels of a head, Q channels of the convolution.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.backends import FP32_OR_BF16, Takes
from megatron_blackmamba.ops.matvec.cpp import MAX_VECTORS

TAKES = Takes("cpu", FP32_OR_BF16)


class BlockStep:
    """A block in C++. Its weights are checked and described once; a call brings what changes with every token."""

    restarts = False

    def __init__(self, arguments: library.Arguments, workspace: int, **moving: tuple[int, ...]):
        self.arguments, self.workspace, self.moving = arguments, workspace, moving

    def __call__(self, *moving_B: Tensor, threads: int | None = None, last_B: Tensor | None = None) -> None:
        """Take the residual stream `[B, D]`, and what the block remembers, one token further, in place."""
        for parts_B in zip(*(tensor.split(MAX_VECTORS) for tensor in moving_B), strict=True):
            self._advance(parts_B, threads)

    def _advance(self, moving_B: tuple[Tensor, ...], threads: int | None) -> None:
        B = moving_B[0].shape[0]
        arguments = self.arguments.copy()
        for (name, shape), tensor in zip(self.moving.items(), moving_B, strict=True):
            _check(name, tensor, (B, *shape))
            arguments.set(**{name: tensor})
        arguments.set(B=B, threads=torch.get_num_threads() if threads is None else threads)
        arguments.set(workspace=moving_B[0].new_empty(B * self.workspace))
        library.call(arguments.function, arguments)


def mamba_step(
    *,
    norm_D: Tensor,
    in_proj: Tensor,
    conv_weight_IK: Tensor,
    conv_bias_I: Tensor,
    x_proj: Tensor,
    dt_proj_IR: Tensor,
    dt_bias_I: Tensor,
    A_IN: Tensor,
    D_I: Tensor,
    out_proj: Tensor,
    eps: float,
    eod: int | None = None,
) -> BlockStep:
    (I, N), K, D, R = A_IN.shape, conv_weight_IK.shape[1], norm_D.shape[0], dt_proj_IR.shape[1]
    arguments = _MambaStep(D=D, I=I, N=N, R=R, K=K, eps=eps)
    _describe(arguments, "norm", norm_D, (D,))
    _describe_matrix(arguments, "in_proj", in_proj, (2 * I, D))
    _describe(arguments, "conv_weight", conv_weight_IK.t().contiguous(), (K, I))
    _describe(arguments, "conv_bias", conv_bias_I, (I,))
    _describe_matrix(arguments, "x_proj", x_proj, (R + 2 * N, I))
    _describe_matrix(arguments, "dt_proj", dt_proj_IR, (I, R))
    _describe(arguments, "dt_bias", dt_bias_I, (I,))
    _describe(arguments, "A", A_IN, (I, N))
    _describe(arguments, "D_skip", D_I, (I,))
    _describe_matrix(arguments, "out_proj", out_proj, (D, I))
    return BlockStep(arguments, D + 2 * I + R + 2 * N, residual=(D,), window=(K - 1, I), state=(I, N))


def mamba2_step(
    *,
    norm_D: Tensor,
    in_proj: Tensor,
    conv_weight_QK: Tensor,
    conv_bias_Q: Tensor,
    dt_bias_H: Tensor,
    A_H: Tensor,
    D_H: Tensor,
    norm_I: Tensor,
    out_proj: Tensor,
    groups: int,
    eps: float,
) -> BlockStep:
    (Q, K), D, I, H = conv_weight_QK.shape, norm_D.shape[0], norm_I.shape[0], A_H.shape[0]
    P, N = I // H, (Q - I) // (2 * groups)
    arguments = _Mamba2Step(D=D, I=I, H=H, P=P, G=groups, N=N, K=K, eps=eps)
    _describe(arguments, "norm", norm_D, (D,))
    _describe_matrix(arguments, "in_proj", in_proj, (I + Q + H, D))
    _describe(arguments, "conv_weight", conv_weight_QK.t().contiguous(), (K, I + 2 * groups * N))
    _describe(arguments, "conv_bias", conv_bias_Q, (Q,))
    _describe(arguments, "dt_bias", dt_bias_H, (H,))
    _describe(arguments, "A", A_H, (H,))
    _describe(arguments, "D_skip", D_H, (H,))
    _describe(arguments, "gate_norm", norm_I, (H * P,))
    _describe_matrix(arguments, "out_proj", out_proj, (D, I))
    return BlockStep(arguments, D + I + Q + H, residual=(D,), window=(K - 1, Q), state=(H, P, N))


def experts_step(
    *,
    norm_D: Tensor,
    router_ED: Tensor,
    router_bias_E: Tensor,
    fc1_EGD: Tensor,
    fc2_EDF: Tensor,
    activation: str,
    eps: float,
    choice_bias_E: Tensor | None = None,
    bias_on_scores: bool = False,
) -> BlockStep:
    E, D, F = fc2_EDF.shape
    gelu = {"silu": 0, "gelu": 1}[activation]
    arguments = _ExpertsStep(D=D, E=E, F=F, gelu=gelu, bias_on_scores=bias_on_scores, eps=eps)
    _describe(arguments, "norm", norm_D, (D,))
    _describe(arguments, "router", router_ED, (E, D))
    _describe(arguments, "router_bias", router_bias_E, (E,))
    if choice_bias_E is not None:
        _describe(arguments, "choice_bias", choice_bias_E, (E,))
    _describe_matrix(arguments, "fc1", fc1_EGD, (E, 2 * F, D))
    _describe_matrix(arguments, "fc2", fc2_EDF, (E, D, F))
    return BlockStep(arguments, D + F, residual=(D,))


def _describe(arguments: library.Arguments, name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    _check(name, weight, shape)
    arguments.set(**{name: weight})


def _describe_matrix(arguments: library.Arguments, name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    """Describe a matrix, or the first matrix of stacked experts."""
    _check(name, weight, shape, FP32_OR_BF16)
    arguments.set(**{name: library.Matrix.of(weight.view(-1, *shape[-2:])[0])})
    arguments.tensors.append(weight)


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous() or tensor.device.type != "cpu":
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
            f"where contiguous {wanted} {shape} on the CPU is needed"
        )


class _MambaStep(library.Arguments):
    """struct MambaStep of csrc/decoding.h."""

    function = "mamba_step"
    _fields_ = library.fields(
        "int64 B D I N R K threads; float eps; pointer norm; matrix in_proj; pointer conv_weight conv_bias;"
        "matrix x_proj dt_proj; pointer dt_bias A D_skip; matrix out_proj; pointer residual window state workspace"
    )


class _Mamba2Step(library.Arguments):
    """struct Mamba2Step of csrc/decoding.h."""

    function = "mamba2_step"
    _fields_ = library.fields(
        "int64 B D I H P G N K threads; float eps; pointer norm; matrix in_proj;"
        "pointer conv_weight conv_bias dt_bias A D_skip gate_norm; matrix out_proj;"
        "pointer residual window state workspace"
    )


class _ExpertsStep(library.Arguments):
    """struct ExpertsStep of csrc/decoding.h."""

    function = "experts_step"
    _fields_ = library.fields(
        "int64 B D E F gelu bias_on_scores threads; float eps; pointer norm router router_bias choice_bias;"
        "matrix fc1 fc2; pointer residual workspace"
    )
