"""One token of a few sequences through a whole block, norm and residual included: C++ on CPUs, Triton on GPUs.

At batch 1 a block lasts as long as memory takes to deliver its weights, if little else happens between two matrices.
The C++ is csrc/decoding.cpp, the Triton kernels are called by `triton`.

Shapes: B sequences, D model, I inner, W window, K = W + 1 taps, N state, R rank of dt, E experts, F expert hidden,
G = 2F gate and up. For Mamba-2: H heads, P channels of a head, Q channels of the convolution.
"""

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends, library
from megatron_blackmamba.ops.matvec import MAX_VECTORS, Matrix, matrix


def why_not(weight: Tensor) -> str | None:
    """Return why blocks of such weights cannot run here, or None."""
    if backends.triton_of("decoding", weight):
        return None
    return why_not_cpp(weight)


def why_not_cpp(weight: Tensor) -> str | None:
    if reason := library.unavailable():
        return reason
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return f"{weight.dtype} on {weight.device.type}"
    return None


class Step(Protocol):
    """A block, ready to run."""

    restarts: bool
    """Whether it forgets a sequence whose last token is the end of a document, where the model does."""

    def __call__(self, *moving_B: Tensor, threads: int | None = None, last_B: Tensor | None = None) -> None:
        """Take the residual stream `[B, D]`, and what the block remembers, one token further, in place.

        last_B: the last token of each sequence, for a block that restarts.
        """
        ...


class CppStep:
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
        library.call(arguments.function, arguments, library.isa())


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
) -> Step:
    """Compute residual_BD += out_proj(scan(convolution(in_proj(norm(residual))))); update window_BWI and state_BIN.

    Window and state have the layout of `causal_conv1d_step` and `selective_scan_step`. The rows of in_proj are [x | z];
    the rows of x_proj are [dt | B | C].

    eod: token after which a sequence restarts, for a step that `restarts`.
    """
    if triton := backends.triton_of("decoding", in_proj):
        return triton.MambaStep(
            norm_D=norm_D, in_proj=in_proj, conv_weight_IK=conv_weight_IK, conv_bias_I=conv_bias_I, x_proj=x_proj,
            dt_proj_IR=dt_proj_IR, dt_bias_I=dt_bias_I, A_IN=A_IN, D_I=D_I, out_proj=out_proj, eps=eps, eod=eod,
        )  # fmt: skip
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
    return CppStep(arguments, D + 2 * I + R + 2 * N, residual=(D,), window=(K - 1, I), state=(I, N))


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
) -> Step | None:
    """Compute residual_BD += out_proj(gated_rms_norm(ssd(convolution(in_proj(norm(residual)))))).

    Update window_BWQ and state_BHPN, which have the layout of `causal_conv1d_step` and `ssd_step`. The rows of in_proj
    are [z | x | B | C | dt]. On CPUs only.
    """
    if why_not_cpp(in_proj):
        return None
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
    return CppStep(arguments, D + I + Q + H, residual=(D,), window=(K - 1, Q), state=(H, P, N))


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
) -> Step:
    """Compute residual_BD += sigmoid(its router logit) * expert(norm(residual)), with the expert of the largest logit.

    choice_bias_E: added to the logits for the choice alone; with bias_on_scores, to their sigmoids.
    Only the weights of the chosen expert are read. The experts have the layout of `grouped_experts`.
    """
    if triton := backends.triton_of("decoding", fc1_EGD):
        return triton.ExpertsStep(
            norm_D=norm_D, router_ED=router_ED, router_bias_E=router_bias_E, fc1_EGD=fc1_EGD, fc2_EDF=fc2_EDF,
            activation=activation, eps=eps, choice_bias_E=choice_bias_E, bias_on_scores=bias_on_scores,
        )  # fmt: skip
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
    return CppStep(arguments, D + F, residual=(D,))


def mlp_step(*, norm_D: Tensor, fc1_GD: Tensor, fc2_DF: Tensor, activation: str, eps: float) -> Step | None:
    """Compute residual_BD += mlp(norm(residual)) of a gated MLP, where there is a kernel for it."""
    if triton := backends.triton_of("decoding", fc1_GD):
        return triton.ExpertsStep(
            norm_D=norm_D, fc1_EGD=fc1_GD[None], fc2_EDF=fc2_DF[None], activation=activation, eps=eps
        )
    return None


def embedded(tokens: Tensor, embedding_VD: Tensor, multiplier: float) -> Tensor | None:
    """Return the embeddings of any tokens in fp32, times a factor, if there is a kernel for that."""
    if triton := backends.triton_of("decoding", embedding_VD):
        stream: Tensor = triton.embedded(tokens, embedding_VD, multiplier)
        return stream
    return None


def product(x_BI: Tensor, weight_OI: Tensor) -> Tensor | None:
    """Return x @ weight.T of a few vectors in fp32, if there is a kernel for that which does not round the result."""
    triton = backends.triton_of("decoding", weight_OI)
    if triton is None or x_BI.dim() != 2 or not 0 < len(x_BI) <= triton.MOST_ROWS:
        return None
    y_BO: Tensor = triton.product(x_BI, weight_OI)
    return y_BO


def likeliest(logits_BV: Tensor) -> Tensor | None:
    """Return the token with the largest logit of each sequence, if there is a kernel; -1 where one is not finite."""
    if triton := backends.triton_of("decoding", logits_BV):
        token_B: Tensor = triton.likeliest(logits_BV)
        return token_B
    return None


def _describe(arguments: library.Arguments, name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    _check(name, weight, shape)
    arguments.set(**{name: weight})


def _describe_matrix(arguments: library.Arguments, name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    """Describe a matrix, or the first matrix of stacked experts."""
    _check(name, weight, shape, (torch.float32, torch.bfloat16))
    arguments.set(**{name: matrix(weight.view(-1, *shape[-2:])[0])})
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
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "D", "I", "N", "R", "K", "threads")),
        ("eps", ctypes.c_float),
        ("norm", ctypes.c_void_p),
        ("in_proj", Matrix),
        *((name, ctypes.c_void_p) for name in ("conv_weight", "conv_bias")),
        *((name, Matrix) for name in ("x_proj", "dt_proj")),
        *((name, ctypes.c_void_p) for name in ("dt_bias", "A", "D_skip")),
        ("out_proj", Matrix),
        *((name, ctypes.c_void_p) for name in ("residual", "window", "state", "workspace")),
    )


class _Mamba2Step(library.Arguments):
    """struct Mamba2Step of csrc/decoding.h."""

    function = "mamba2_step"
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "D", "I", "H", "P", "G", "N", "K", "threads")),
        ("eps", ctypes.c_float),
        ("norm", ctypes.c_void_p),
        ("in_proj", Matrix),
        *((name, ctypes.c_void_p) for name in ("conv_weight", "conv_bias", "dt_bias", "A", "D_skip", "gate_norm")),
        ("out_proj", Matrix),
        *((name, ctypes.c_void_p) for name in ("residual", "window", "state", "workspace")),
    )


class _ExpertsStep(library.Arguments):
    """struct ExpertsStep of csrc/decoding.h."""

    function = "experts_step"
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "D", "E", "F", "gelu", "bias_on_scores", "threads")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("norm", "router", "router_bias", "choice_bias")),
        *((name, Matrix) for name in ("fc1", "fc2")),
        *((name, ctypes.c_void_p) for name in ("residual", "workspace")),
    )
