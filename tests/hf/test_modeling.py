"""The modeling files inside an export, loaded as users load them."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

from megatron_blackmamba.hf.cache_blackmamba import CACHE
from tests.reference import forward

TOKENS = [int(t) for t in np.random.default_rng(1).integers(1, 64, size=40)]


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def reference(model, tokens=TOKENS):
    return torch.from_numpy(forward(model.weights, model.config, tokens).logits_SV)


@pytest.fixture(scope="module")
def model(export, silu):
    return load(export(silu), kernels="torch")


@pytest.fixture(params=["torch", "auto"])
def kernels(request):
    return request.param


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_agrees_with_the_reference_in_logits_and_routing(export, activation, kernels, request):
    tiny = request.getfixturevalue(activation)
    output = load(export(tiny), kernels=kernels)(torch.tensor([TOKENS]), output_router_choices=True)
    torch.testing.assert_close(output.logits[0].double(), reference(tiny), atol=3e-5, rtol=3e-5)
    expected = forward(tiny.weights, tiny.config, TOKENS).routes
    assert [choices[0].tolist() for choices in output.router_choices] == list(expected.values())


@pytest.mark.parametrize("pieces", [[40], [6, 34], [7, 33], [5, 1, 1, 1, 32], [1] * 40])
def test_state_resets_after_end_of_document(export, resetting, pieces, kernels):
    tokens = [*TOKENS[:6], 0, *TOKENS[7:9], 0, 0, *TOKENS[11:]]
    model, cache, logits, start = load(export(resetting), kernels=kernels), None, [], 0
    for length in pieces:
        output = model(torch.tensor([tokens[start : start + length]]), cache=cache, use_cache=True)
        cache, start = output.get(CACHE), start + length
        logits.append(output.logits[0])
    torch.testing.assert_close(torch.cat(logits).double(), reference(resetting, tokens), atol=5e-5, rtol=5e-5)


def test_equal_experts_yield_the_first(model):
    router = next(module for module in model.modules() if hasattr(module, "selecting"))
    for experts in ([0, 3], [1, 2]):
        logits_TE = torch.zeros(64, router.out_features).index_fill_(1, torch.tensor(experts), 1.0)
        assert router.choose(logits_TE)[1].unique().tolist() == experts[:1]


def test_the_loss_is_that_of_the_next_token(model):
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    output = model(tokens, labels=tokens)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


def test_gradients_match_finite_differences(export, silu):
    model = load(export(silu), kernels="torch").double()

    def loss():
        return torch.nn.functional.cross_entropy(model(torch.tensor([TOKENS])).logits[0, :-1], torch.tensor(TOKENS[1:]))

    loss().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    weight = model.model.decoder.layers[0].mixer.A_log
    with torch.no_grad():
        losses = []
        for step in (1e-4, -2e-4):
            weight[3, 2] += step
            losses.append(loss().item())
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(weight.grad[3, 2].item(), rel=1e-4)


@pytest.fixture(params=[{}, {"use_reentrant": True}, {"use_reentrant": False}], ids=["default", "reentrant", "not"])
def checkpointing(request):
    return request.param


def test_gradient_checkpointing_recomputes_with_equal_gradients(export, silu, kernels, checkpointing):
    model = load(export(silu), kernels=kernels).train()
    runs = []
    for layer in model.model.decoder.layers:
        layer.norm.register_forward_pre_hook(lambda norm, inputs: runs.append(norm))
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])

    def gradients():
        runs.clear()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain = gradients()
    assert len(runs) == 4 and all(gradient.abs().max() > 0 for gradient in plain.values())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing or None)
    again = gradients()
    assert len(runs) == 8
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
    model.eval()
    gradients()
    assert len(runs) == 4  # as in every model of transformers, only in training mode


def test_gradient_checkpointing_works_with_frozen_embeddings(export, silu):
    model = load(export(silu), kernels="torch").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model.requires_grad_(False)
    weight = model.model.decoder.layers[0].mixer.in_proj.weight.requires_grad_(True)
    model(torch.tensor([TOKENS]), labels=torch.tensor([TOKENS])).loss.backward()
    assert weight.grad.abs().max() > 0


def test_gradient_checkpointing_refuses_a_carried_state(export, silu):
    model = load(export(silu), kernels="torch").train()
    model.gradient_checkpointing_enable()
    cache = load(export(silu))(torch.tensor([TOKENS])).get(CACHE)
    assert model(torch.tensor([TOKENS]), use_cache=True).get(CACHE) is None  # ignored with a warning, as everywhere
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        model(torch.tensor([TOKENS]), cache=cache)
    assert model.generate(torch.tensor([TOKENS]), max_new_tokens=2).shape == (1, 42)  # no gradient, nothing to save


def test_a_resized_vocabulary_has_as_many_logits(export, silu):
    model = load(export(silu), kernels="torch")
    before = model(torch.tensor([TOKENS])).logits
    model.resize_token_embeddings(70)
    after = model(torch.tensor([TOKENS])).logits
    assert after.shape[-1] == 70 and torch.equal(after[..., :64], before)
    embedding = torch.nn.Embedding.from_pretrained(torch.eye(70, 32))
    model.set_input_embeddings(embedding)
    model.tie_weights()
    assert model.get_input_embeddings() is embedding and model.get_output_embeddings().weight is embedding.weight
    assert torch.equal(model.get_input_embeddings()(torch.tensor([3])), torch.eye(70, 32)[3:4])
    assert model(torch.tensor([TOKENS])).logits.shape[-1] == 70


def greedy_by_hand(model, prompt, new):
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def test_generate_greedily_is_argmax_of_the_full_forward(model):
    prompt = TOKENS[:5]
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert out[0].tolist() == greedy_by_hand(model, prompt, 12)


def test_sampling_depends_on_the_seed_alone(model):
    def sample(seed):
        torch.manual_seed(seed)
        prompt, options = torch.tensor([TOKENS[:5]]), {"do_sample": True, "temperature": 8.0, "top_p": 0.95}
        return model.generate(prompt, max_new_tokens=12, **options).tolist()

    assert sample(1) == sample(1) != sample(2)


def test_beams_keep_their_own_states(model):
    prompt = torch.tensor([TOKENS[:5]])
    options = {"max_new_tokens": 8, "num_beams": 4, "num_return_sequences": 4, "do_sample": False, "eos_token_id": None}
    cached = model.generate(prompt, **options)
    torch.testing.assert_close(cached, model.generate(prompt, use_cache=False, **options))
    assert len({tuple(beam) for beam in cached.tolist()}) == 4


def test_left_padding_leaves_each_row_unchanged(model):
    prompts = [TOKENS[:9], TOKENS[3:5], TOKENS[20:26]]
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    alone = [model.generate(torch.tensor([p]), **options)[0] for p in prompts]
    padded = torch.tensor([[0] * (9 - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (9 - len(p)) + [1] * len(p) for p in prompts])
    batch = model.generate(padded, attention_mask=mask, **options)
    assert [row[-10:].tolist() for row in batch] == [row[-10:].tolist() for row in alone]
    logits = model(padded, attention_mask=mask).logits[1, -2:]
    torch.testing.assert_close(logits, model(torch.tensor([prompts[1]])).logits[0], atol=3e-5, rtol=3e-5)


def test_state_longer_than_its_input_is_refused(model):
    cache = model(torch.tensor([TOKENS[:8]]), use_cache=True).get(CACHE)
    with pytest.raises(ValueError, match="has seen 8 tokens"):
        model.generate(torch.tensor([TOKENS[8:10]]), **{CACHE: cache}, max_new_tokens=2)


def test_ids_and_embeddings_exclude_each_other(model):
    ids = torch.tensor([TOKENS[:3]])
    for given in ({}, {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="pass either input_ids or inputs_embeds"):
            model(**given)


def test_mask_of_all_tokens_says_which_are_new(model):
    cache = model(torch.tensor([TOKENS[:8]]), use_cache=True).get(CACHE)
    for ids in (TOKENS[8:10], TOKENS[:10]):  # as transformers 4 asks, with the past or without
        asked = {"cache": cache, "attention_mask": torch.ones(1, 10, dtype=torch.long)}
        found = model.prepare_inputs_for_generation(torch.tensor([ids]), **asked)
        assert found["input_ids"].tolist() == [TOKENS[8:10]]


def test_the_cache_does_not_grow(model):
    cache = model(torch.tensor([TOKENS[:2]]), use_cache=True).get(CACHE)

    def sizes():
        layers = [i for i, kind in enumerate(model.config.mamba_moe_layers) if kind == "r"]
        return [(cache.get_conv_state(i).shape, cache.get_recurrent_state(i).shape) for i in layers]

    before = sizes()
    model(torch.tensor([TOKENS]), cache=cache, use_cache=True)
    assert sizes() == before and cache.documents_BS is None
    assert cache.get_seq_length() == 42


def test_the_pipeline_writes_text(export, silu):
    folder = export(silu)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write = pipeline("text-generation", model=load(folder, kernels="torch"), tokenizer=tokenizer)
    texts = [write(p, max_new_tokens=5, do_sample=False)[0]["generated_text"] for p in ("a state space", "so")]
    assert texts[0].startswith("a state space") and len(texts[0]) > len("a state space")
    batched = write(["a state space", "so"], max_new_tokens=5, do_sample=False, batch_size=2)
    assert [out[0]["generated_text"] for out in batched] == texts


def test_bf16_leaves_the_recurrence_in_fp32(export, silu):
    for model in (load(export(silu), torch_dtype=torch.bfloat16), load(export(silu)).to(torch.bfloat16)):
        types = {name: parameter.dtype for name, parameter in model.named_parameters()}
        kept = {name for name, dtype in types.items() if dtype == torch.float32}
        assert kept and all(name.split("mixer.")[1].startswith(("A_log", "D", "dt_proj")) for name in kept)
        assert torch.equal(model.model.decoder.layers[0].mixer.A_log, silu.weights["decoder.layers.0.mixer.A_log"])
        logits = model(torch.tensor([TOKENS])).logits
        assert logits.dtype == torch.bfloat16 and torch.isfinite(logits).all()
        out = model.generate(torch.tensor([TOKENS[:5]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert out.shape == (1, 9)


@pytest.mark.parametrize("name", ["decoder.layers.0.mixer.dt_proj", "decoder.layers.1.mixer.router"])
def test_autocast_rounds_neither_time_steps_nor_routing(model, name):
    module = model.model.get_submodule(name)
    x = torch.randn(7, module.weight.shape[1], generator=torch.Generator().manual_seed(3))
    exact = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(x), exact, rtol=0, atol=0)


def test_save_pretrained_gives_back_the_same_model(export, silu, tmp_path):
    model = load(export(silu), kernels="torch")
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    for name, weight in silu.weights.items():
        assert torch.equal(again.state_dict()["model." + name], weight), name
    torch.testing.assert_close(again(torch.tensor([TOKENS])).logits, model(torch.tensor([TOKENS])).logits)
    assert again.config.activation == "silu" and again.config.mamba_moe_layers == ["r", "4", "r", "4"]
    body = AutoModel.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert body(torch.tensor([TOKENS])).last_hidden_state.shape == (1, 40, 32)


def test_a_new_model_starts_from_sane_weights(export, silu):
    config = load(export(silu)).config
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    delta = torch.nn.functional.softplus(model.model.decoder.layers[0].mixer.dt_proj.bias)
    assert delta.min() > 0.9e-3 and delta.max() < 0.11
    assert torch.equal(model.model.decoder.layers[0].mixer.A_log[0].exp().round(), torch.arange(1.0, 9.0))
    loss = model(torch.tensor([TOKENS]), labels=torch.tensor([TOKENS])).loss
    assert abs(loss.item() - np.log(64)) < 0.3
