"""The paper's other architectures, and hybrids, go the whole way: export, transformers, import, generation."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_blackmamba.hf.cache_blackmamba import CACHE
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.generator import Generator
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import convert, hf, megatron, parity
from tests.reference import forward, tiny
from tests.reference.canonical import canonical

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.5,
}
ARCHITECTURES = {
    "transformer": {"layers": "amam"},
    "transformer_moe": {"layers": "a4a4"},
    "hybrid": {"layers": "r4a4"},
    "mamba2": {"layers": "s4"},
    "mamba2_hybrid": {"layers": "r4s4", "eod_reset": 7},
    "mamba2_attention": {"layers": "s4a4"},
    "mamba3": {"layers": "t4"},
    "mamba3_mimo": {"layers": "t4t", "eod_reset": 7, "mamba3_rank": 3, "mamba3_output_norm": True},
    "mamba3_hybrid": {"layers": "r4t4s", "eod_reset": 7, "mamba3_output_norm": True, "mamba3_rope_fraction": 1.0},
    "delta": {"layers": "d4d"},
    "delta_kda": {"layers": "rd4", "eod_reset": 7, "delta_variant": "kda", "delta_decay_rank": 4},
    "delta_gdn2": {"layers": "d4ad", "eod_reset": 7, "delta_variant": "gdn2", "delta_negative_eigenvalues": True},
    "documents": {"layers": "ra4t", "eod_reset": 7},
    "across_documents": {"layers": "ra4", "eod_reset": 7, "attention_across_documents": True},
    "parallel": {"layers": "r4r4", "arrangement": "parallel"},
    "all_parallel": {"layers": "ra4m", "arrangement": "parallel"},
    "sinkhorn_2": {"layers": "r4r4", "num_experts_per_tok": 2},
    "shared_expert": {"layers": "r4", "shared_expert_hidden_size": 24},
    "latent": {"layers": "r4s4", "latent_size": 10, "num_experts_per_tok": 2, "shared_expert_hidden_size": 24},
    "latent_one": {"layers": "r4", "latent_size": 20},
    "softmax_2": {"layers": "a4", "num_experts_per_tok": 2, "router_kind": "softmax", "router_scores": "softmax"},
    "expert_bias_3": {
        "layers": "r4r4",
        "num_experts_per_tok": 3,
        "shared_expert_hidden_size": 40,
        "router_kind": "expert_bias",
        "router_biased": True,
        "router_normalized": True,
    },
    "mamba_norms": {"layers": "r4r4", "mamba_norms": True, "eod_reset": 7},
    "every_norm": {"layers": "rsa4", "mamba_norms": True, "qk_norm": True, "logit_softcap": 3.0, **MULTIPLIERS},
    "nemotron": {
        "layers": "s4am",
        "activation": "relu2",
        "gated": False,
        "final_norm": "rms",
        "tie_word_embeddings": False,
        "head_dim": 6,
        "rotary": False,
        "mamba2_heads": 6,
        "mamba2_time_step_min": 0.1,
        "num_experts_per_tok": 2,
        "router_kind": "expert_bias",
        "router_biased": True,
        "router_normalized": True,
        "router_bias": False,
        "router_scale": 2.5,
        "shared_expert_hidden_size": 20,
    },
    "mixtral": {
        "layers": "a4a4",
        "activation": "relu2",
        "final_norm": "rms",
        "head_dim": 12,
        "num_experts_per_tok": 2,
        "router_kind": "softmax",
        "router_scores": "softmax",
        "router_normalized": True,
        "router_bias": False,
        "router_scale": 1.5,
    },
    "scaled_sinkhorn": {"layers": "r4", "router_scale": 0.5, "router_bias": False, "activation": "gelu"},
    "expert_choice": {"layers": "r4", "router_kind": "expert_choice", "router_scores": "softmax"},
}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(1, 64, size=24)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def made(request, tmp_path_factory):
    """A model and its export, compared with megatron's answers on the way."""
    model = tiny(**{"activation": "silu", **ARCHITECTURES[request.param]}, seed=2)
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    hf.write(canonical(model), folder)
    assert parity.check(canonical(model), hf.read(folder)).agrees
    return model, folder


def expected(model, tokens=TOKENS):
    return torch.from_numpy(forward(model.weights, model.config, tokens).logits_SV)


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_export_agrees_with_the_reference(made):
    model, folder = made
    logits = loaded(folder)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits.double(), expected(model), atol=2e-5, rtol=2e-5)


def test_export_imports_bit_exactly(made, tmp_path):
    model, folder = made
    convert.to_checkpoint(hf.read(folder), tmp_path / "checkpoint", verify=False)
    checkpoint = megatron.read(tmp_path / "checkpoint")
    for field in ("router", "top_k", "shared_expert_hidden_size", "pattern"):
        assert getattr(checkpoint.config, field) == getattr(canonical(model).config, field)
    back = dict(checkpoint.tensors())
    for name, weight in hf.read(folder).tensors():
        assert torch.equal(back[name], weight), name


def test_model_that_transformers_saves_is_the_same(made, tmp_path):
    """transformers writes out what the config leaves to be derived."""
    _, folder = made
    loaded(folder).save_pretrained(tmp_path)
    assert hf.function_of(hf.read(tmp_path).config) == hf.function_of(hf.read(folder).config)


def test_half_precision_keeps_expert_bias(made):
    model, folder = made
    network = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.bfloat16)
    for moved in (network, network.to(torch.float32).to(torch.bfloat16)):
        biases = {name: value for name, value in moved.state_dict().items() if name.endswith("expert_bias")}
        assert len(biases) == (model.config["mamba_moe_layers"].count("4") if model.config.get("router_biased") else 0)
        for name, value in biases.items():
            assert torch.equal(value, model.weights[name.removeprefix("model.")])


def test_export_names_the_experts_of_each_token(made):
    model, folder = made
    trace = forward(model.weights, model.config, TOKENS)
    choices = loaded(folder)(torch.tensor([TOKENS]), output_router_choices=True).router_choices
    chosen = [(choice[0] if choice.dim() == 2 else choice[0].sort(-1).values).tolist() for choice in choices]
    assert chosen == list(trace.routes.values())


@torch.no_grad()
def test_export_continues_from_its_cache(made):
    model, folder = made
    network, cache, logits = loaded(folder), None, []
    for start, end in [(0, 7), (7, 8), (8, 20), (20, 24)]:
        output = network(torch.tensor([TOKENS[start:end]]), cache=cache, use_cache=True)
        cache = output.get(CACHE)
        logits.append(output.logits[0])
    torch.testing.assert_close(torch.cat(logits).double(), expected(model), atol=5e-5, rtol=5e-5)


def test_decoder_agrees_with_the_reference(made):
    model, folder = made
    decoder = Decoder(pack(hf.read(folder), torch.float32))
    stepping, reading = decoder.start(1), decoder.start(1)
    steps = torch.cat([decoder.step(stepping, torch.tensor([token])) for token in TOKENS])
    torch.testing.assert_close(steps.double(), expected(model), atol=5e-5, rtol=5e-5)
    pieces = [decoder.read_all(reading, torch.tensor([TOKENS[a:b]]))[0] for a, b in [(0, 9), (9, 10), (10, 24)]]
    torch.testing.assert_close(torch.cat(pieces).double(), expected(model), atol=5e-5, rtol=5e-5)


def test_decoder_and_transformers_write_the_same(made):
    _, folder = made
    prompts = [TOKENS[:9], TOKENS[9:12], TOKENS[12:]]
    generator = Generator(Decoder(pack(hf.read(folder), torch.float32)))
    ours = list(zip(*generator.tokens(prompts, max_new_tokens=12, stop=-1), strict=True))
    network = loaded(folder)
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    theirs = network.generate(
        padded, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert [list(row) for row in ours] == theirs[:, width:].tolist()
    alone = list(generator.tokens([prompts[1]], max_new_tokens=12, stop=-1))
    assert [step[0] for step in alone] == list(ours[1])
