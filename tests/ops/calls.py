"""A call of each op with small arguments, for tests that change one argument."""

import torch

from megatron_blackmamba.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from megatron_blackmamba.ops.cross_entropy import cross_entropy
from megatron_blackmamba.ops.experts import grouped_experts, grouped_linear
from megatron_blackmamba.ops.gated import gated
from megatron_blackmamba.ops.gated_norm import gated_rms_norm
from megatron_blackmamba.ops.matvec import matvec
from megatron_blackmamba.ops.rms_norm import rms_norm
from megatron_blackmamba.ops.selective_scan import selective_scan, selective_scan_step
from megatron_blackmamba.ops.sinkhorn import sinkhorn_choice

B, L, I, N, K, T, D, E, F = 2, 5, 8, 4, 4, 6, 8, 2, 8


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
    gated_rms_norm: (gated_rms_norm, {"x": (T, D), "gate": (T, D), "weight_I": (D,)}),
    rms_norm: (rms_norm, {"x": (T, D), "weight_D": (D,)}),
    matvec: (matvec, {"weight_OI": (E, D), "x_BI": (T, D)}),
    cross_entropy: (cross_entropy, {"logits_TV": (T, E)}),
}  # fmt: skip
OTHERS = {
    grouped_experts: {"tokens_per_expert_E": torch.tensor([2, 4])},
    grouped_linear: {"tokens_per_expert_E": torch.tensor([2, 4])},
    gated: {"activation": "silu"},
    gated_rms_norm: {"groups": 2, "eps": 1e-5},
    rms_norm: {"eps": 1e-5},
    cross_entropy: {"labels_T": torch.zeros(T, dtype=torch.int64)},
}


def arguments_of(op):
    random = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=random) for name, shape in OPS[op][1].items()}
    if "A_IN" in drawn:
        drawn["A_IN"] = -drawn["A_IN"].exp()
    return {name: tensor.bfloat16().float() for name, tensor in drawn.items()}  # the same numbers in every format


def answers(op, **changed):
    answer = OPS[op][0](**(arguments_of(op) | OTHERS.get(op, {}) | changed))
    return answer if isinstance(answer, tuple) else (answer,)
