"""Number formats: every op computes with every floating-point argument it accepts, and refuses the others by name."""

import inspect

import pytest
import torch

from megatron_blackmamba.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from megatron_blackmamba.ops.cross_entropy import cross_entropy
from megatron_blackmamba.ops.experts import grouped_experts, grouped_linear
from megatron_blackmamba.ops.gated import gated
from megatron_blackmamba.ops.matvec import matvec
from megatron_blackmamba.ops.rms_norm import rms_norm
from megatron_blackmamba.ops.selective_scan import selective_scan, selective_scan_step
from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice

B, L, I, N, K, T, D, E, F = 2, 5, 8, 4, 4, 6, 8, 2, 8
NOT_FLOATS = [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]
FLOATS = [torch.float16, torch.bfloat16, torch.float64]


def scan(**arguments):
    return selective_scan(**arguments, return_final_state=True)


def convolution(**arguments):
    return causal_conv1d(**arguments, return_final_window=True)


def scan_step(state_BIN, **arguments):
    state_BIN = state_BIN.clone()
    return selective_scan_step(state_BIN, **arguments), state_BIN


def convolution_step(window_BWI, **arguments):
    window_BWI = window_BWI.clone()
    return causal_conv1d_step(window_BWI, **arguments), window_BWI


OPS = {
    selective_scan: (scan, {"u_BLI": (B, L, I), "delta_BLI": (B, L, I), "A_IN": (I, N), "B_BLN": (B, L, N),
                            "C_BLN": (B, L, N), "D_I": (I,), "z_BLI": (B, L, I), "delta_bias_I": (I,),
                            "initial_state_BIN": (B, I, N)}),
    selective_scan_step: (scan_step, {"state_BIN": (B, I, N), "u_BI": (B, I), "delta_BI": (B, I), "A_IN": (I, N),
                                      "B_BN": (B, N), "C_BN": (B, N), "D_I": (I,), "z_BI": (B, I),
                                      "delta_bias_I": (I,)}),
    causal_conv1d: (convolution, {"x_BLI": (B, L, I), "weight_IK": (I, K), "bias_I": (I,),
                                  "initial_window": (B, K - 1, I)}),
    causal_conv1d_step: (convolution_step, {"window_BWI": (B, K - 1, I), "x_BI": (B, I), "weight_IK": (I, K),
                                            "bias_I": (I,)}),
    sinkhorn_choice: (sinkhorn_choice, {"logits_TE": (T, E)}),
    grouped_experts: (grouped_experts, {"x_TD": (T, D), "fc1_EGD": (E, 2 * F, D), "fc2_EDF": (E, D, F),
                                        "weights_T": (T,)}),
    grouped_linear: (grouped_linear, {"x_TD": (T, D), "weight_EOD": (E, F, D)}),
    gated: (gated, {"gate_up_TG": (T, 2 * F), "weights_T": (T,)}),
    rms_norm: (rms_norm, {"x": (T, D), "weight_D": (D,)}),
    matvec: (matvec, {"weight_OI": (E, D), "x_BI": (T, D)}),
    cross_entropy: (cross_entropy, {"logits_TV": (T, E)}),
}  # fmt: skip
OTHERS = {
    grouped_experts: {"tokens_per_expert_E": torch.tensor([2, 4])},
    grouped_linear: {"tokens_per_expert_E": torch.tensor([2, 4])},
    gated: {"activation": "silu"},
    rms_norm: {"eps": 1e-5},
    cross_entropy: {"labels_T": torch.zeros(T, dtype=torch.int64)},
}
INTEGERS = {"reset_BL", "tokens_E", "tokens_per_expert_E", "ends_E", "labels_T"}
EACH = [pytest.param(op, name, id=f"{op.__name__}-{name}") for op, (_, shapes) in OPS.items() for name in shapes]


def arguments_of(op):
    random = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=random) for name, shape in OPS[op][1].items()}
    if "A_IN" in drawn:
        drawn["A_IN"] = -drawn["A_IN"].exp()
    return {name: tensor.bfloat16().float() for name, tensor in drawn.items()}  # the same numbers in every format


def answers(op, **changed):
    answer = OPS[op][0](**(arguments_of(op) | changed), **OTHERS.get(op, {}))
    return answer if isinstance(answer, tuple) else (answer,)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_every_tensor_argument_is_tried(op):
    annotations = {name: str(p.annotation) for name, p in inspect.signature(op).parameters.items()}
    tensors = {name for name, what in annotations.items() if "Tensor" in what and "Callable" not in what}
    assert tensors - INTEGERS == set(OPS[op][1])


@pytest.mark.parametrize("op, name", EACH)
def test_complex_numbers_and_integers_are_refused_by_name(op, name):
    spoken = name.rpartition("_")[0] if name.rpartition("_")[2].isupper() else name
    for dtype in NOT_FLOATS:
        with pytest.raises(ValueError, match=f"{op.__name__}: {spoken} is {str(dtype)[6:]}. Pass one of float32"):
            answers(op, **{name: arguments_of(op)[name].to(dtype)})


@pytest.mark.parametrize("op, name", EACH)
def test_mixed_precision_arguments_are_computed_or_refused(op, name):
    for dtype in FLOATS:
        try:
            found = answers(op, **{name: arguments_of(op)[name].to(dtype)})
        except ValueError as error:
            assert op in (grouped_experts, grouped_linear, cross_entropy), error
            continue
        for mine, expected in zip(found, answers(op), strict=True):
            assert torch.allclose(mine.double(), expected.double(), atol=3e-2, rtol=3e-2), (name, dtype)
