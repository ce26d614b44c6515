"""Mamba-2 in the modeling files: the scan in plain PyTorch, precisions, and initial values."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_blackmamba.hf import functions_blackmamba as layers
from megatron_blackmamba.hf.configuration_blackmamba import BlackMambaConfig
from megatron_blackmamba.hf.modeling_blackmamba import BlackMambaForCausalLM
from megatron_blackmamba.ops.ssd import ssd
from tests.reference import tiny

EXACT = ("A_log", ".D", "dt_bias")


def problem(reset):
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 150, 4, 3), (2, 150, 4), (4,), (2, 150, 2, 5), (2, 150, 2, 5), (4,), (4,), (2, 4, 3, 5)]
    inputs = [torch.randn(shape, generator=g) for shape in shapes]
    inputs[1] *= torch.logspace(-3, 4, 150)[None, torch.randperm(150, generator=g), None]  # decays of every size
    inputs[2] = -inputs[2].exp()
    return inputs, torch.rand(2, 150, generator=g) < 0.05 if reset else None


@pytest.mark.parametrize("reset", [False, True])
def test_plain_scan_agrees_with_the_definition(reset):
    inputs, reset_BL = problem(reset)
    single, double = (
        [x.detach().to(dtype).requires_grad_() for x in inputs] for dtype in (torch.float32, torch.float64)
    )
    y, state = layers.ssd(*single, reset_BL)
    *given, bias, start = double
    options = {"dt_bias_H": bias, "initial_state_BHPN": start, "reset_BL": reset_BL, "return_final_state": True}
    exact_y, exact_state = ssd(*given, **options, backend="reference")
    for outputs in ((y, state), (exact_y, exact_state)):
        sum(output.square().mean() for output in outputs).backward()
    pairs = [(y, exact_y), (state, exact_state), *((x.grad, e.grad) for x, e in zip(single, double, strict=True))]
    for actual, exact in pairs:
        assert (actual - exact).abs().max() < 1e-5 * exact.abs().max().clamp_min(1.0)


def test_bf16_model_keeps_the_recurrence_in_fp32(export):
    folder = export(tiny("silu", layers="s4"))
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.bfloat16)
    for given in (model, model.float().to(torch.bfloat16)):
        for name, weight in given.named_parameters():
            assert weight.dtype == (torch.float32 if name.endswith(EXACT) else torch.bfloat16), name
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_fresh_model_has_initial_values_of_mamba_ssm():
    sizes = {"hidden_size": 64, "num_layers": 1, "mamba2_head_dim": 2, "vocab_size": 32}
    mixer = BlackMambaForCausalLM(BlackMambaConfig(**sizes, mamba_moe_layers=["mamba2"])).model.decoder.layers[0].mixer
    rates, steps = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 3 and 14 < rates.max() <= 16
    assert 0.99e-3 <= steps.min() < 3e-3 and 0.05 < steps.max() <= 0.101
    assert bool((mixer.D == 1).all()) and bool((mixer.norm.weight == 1).all())
