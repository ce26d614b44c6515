"""Layers of the delta rule against transformers' own modules, with the same weights."""

import pytest
import torch

MODEL = ["model.pattern=G", "training.precision=fp32", "model.delta.head_dim=16", "model.delta.key_dim=16"]
HEADS, GROUPS, K, V, D = 8, 4, 16, 16, 64
INPUT = torch.randn(2, 150, D, generator=torch.Generator().manual_seed(0))


def randomised(module):
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(
                torch.randn(weight.shape, generator=g) * (0.5 if weight.dim() == 1 else weight.shape[1] ** -0.5)
            )
    return module


def computed(mixer, weights):
    from megatron_blackmamba.model.inputs import LayerInputs

    mixer.load_state_dict({**mixer.state_dict(), **weights})
    return mixer(INPUT.transpose(0, 1), LayerInputs(*[None] * len(LayerInputs.__annotations__))).transpose(0, 1)


def qwen():
    """Return Qwen3-Next's layer, and its weights with our names and order of rows."""
    pytest.importorskip("transformers.models.qwen3_next")
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {"linear_num_value_heads": HEADS, "linear_num_key_heads": GROUPS}
    sizes |= {"linear_key_head_dim": K, "linear_value_head_dim": V, "hidden_size": D, "rms_norm_eps": 1e-5}
    made = randomised(Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes), 0))
    each = HEADS // GROUPS
    q, k, v, z = made.in_proj_qkvz.weight.view(GROUPS, -1, D).split([K, K, each * V, each * V], dim=1)
    b, a = made.in_proj_ba.weight.view(GROUPS, -1, D).split([each, each], dim=1)
    in_proj = torch.cat([part.reshape(-1, D) for part in (z, q, k, v, b, a)])
    return made, ["model.delta.key_heads=4"], {"in_proj.weight": in_proj}, "out_proj", "norm"


def kimi():
    """Return Kimi Linear's layer; the two factors of its output gate are one matrix of ours."""
    pytest.importorskip("transformers.models.kimi_linear")
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    sizes = {"linear_num_heads": HEADS, "linear_head_dim": K, "hidden_size": D, "rms_norm_eps": 1e-5}
    made = randomised(KimiLinearDeltaAttention(KimiLinearConfig(**sizes), 0))
    gate, forget = made.g_b_proj.weight @ made.g_a_proj.weight, made.forget_gate
    parts = (made.q_proj.weight, made.k_proj.weight, made.v_proj.weight, made.b_proj.weight, forget.f_a_proj.weight)
    weights = {"in_proj.weight": torch.cat([gate, *parts]), "decay_proj.weight": forget.f_b_proj.weight}
    weights |= {"A_log": forget.A_log.flatten(), "dt_bias": forget.dt_bias}
    return made, ["model.delta.variant=kda"], weights, "o_proj", "o_norm"


@pytest.mark.parametrize("theirs", [qwen, kimi])
def test_layer_computes_as_in_transformers(theirs, build):
    made, words, weights, out, norm = theirs()
    ours = build(*MODEL, *words).decoder.layers[0].mixer
    weights |= {"conv1d.weight": made.conv1d.weight, "norm.weight": getattr(made, norm).weight}
    weights["out_proj.weight"] = getattr(made, out).weight
    weights = {"A_log": getattr(made, "A_log", None), "dt_bias": getattr(made, "dt_bias", None)} | weights
    expected = made(INPUT)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(computed(ours, weights), expected, atol=1e-5, rtol=1e-5)
