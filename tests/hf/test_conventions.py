"""Conventions of transformers models that tools rely on: names, flags, hidden states, packing, compilation."""

import io
import logging
import warnings

import pytest
import torch
import torch._dynamo.testing
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from megatron_blackmamba.hf.cache_blackmamba import CACHE
from megatron_blackmamba.hf.configuration_blackmamba import TRIED, BlackMambaConfig, compare_versions
from megatron_blackmamba.hf.modeling_blackmamba import BlackMambaForCausalLM
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.interchange.canonical import InterchangeError

KINDS = {
    "mamba": ["r", "4", "r", "4"],
    "transformer": ["attention", "mlp"] * 2,
    "hybrid": ["r", "4", "attention", "mlp"],
}
IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(7))


def build(layers, **options):
    torch.manual_seed(3)
    config = BlackMambaConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=len(layers),
        mamba_moe_layers=layers,
        ffn_hidden_size=48,
        mlp_hidden_size=64,
        num_attention_heads=4,
        state_size=8,
        **{"kernels": "torch", **options},
    )
    model = BlackMambaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from the start, where layers add little
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return build(KINDS[request.param])


def test_last_hidden_state_is_normalized(model):
    for network in (model, build(["r", "4"]).to(torch.bfloat16)):
        output = network(IDS, output_hidden_states=True)
        assert len(output.hidden_states) == network.config.num_layers + 1
        assert {state.dtype for state in output.hidden_states} == {network.dtype}
        assert torch.equal(network.lm_head(output.hidden_states[-1]), output.logits)
        assert torch.equal(output.hidden_states[0], network.get_input_embeddings()(IDS))


def test_parts_are_found_by_their_usual_names(model):
    assert model.get_output_embeddings() is model.lm_head
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.base_model is model.model is model.get_decoder()
    states = model.get_decoder()(IDS).last_hidden_state
    assert torch.equal(model.lm_head(states), model(IDS).logits)


def test_flags_of_the_config_are_obeyed():
    model = build(["r", "4"], output_hidden_states=True, output_router_choices=True, use_cache=False)
    output = model(IDS)
    assert len(output.hidden_states) == 3 and len(output.router_choices) == 1 and output.get(CACHE) is None
    model.config.return_dict = False
    assert isinstance(model(IDS), tuple)
    assert model(IDS, output_hidden_states=False, return_dict=True).hidden_states is None


def test_untied_output_layer_has_its_own_weight(tmp_path):
    model = build(["r", "4"], tie_word_embeddings=False)
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    assert torch.equal(BlackMambaForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_gradients_flow_through_the_cache(model):
    (expected,) = torch.autograd.grad(model(IDS).logits[:, -1].sum(), model.lm_head.weight)
    first = model(IDS[:, :5], use_cache=True)
    second = model(IDS[:, 5:9], cache=first.get(CACHE))
    third = model(IDS[:, 9:], cache=second.get(CACHE))
    (got,) = torch.autograd.grad(third.logits[:, -1].sum(), model.lm_head.weight)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_another_cache_is_refused():
    with pytest.raises(ValueError, match="DynamicCache, not a BlackMambaCache"):
        build(["r", "4"])(IDS, cache=DynamicCache())


def test_an_adapter_may_wrap_the_router():
    class Adapter(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer

        def forward(self, x):
            return 2 * self.base_layer(x)

    model = build(["r", "4"])
    expected = model(IDS, output_router_choices=True)
    mixer = model.model.decoder.layers[1].mixer
    mixer.router = Adapter(mixer.router)
    got = model(IDS, output_router_choices=True)
    assert torch.equal(got.router_choices[0], expected.router_choices[0])
    assert not torch.equal(got.logits, expected.logits)  # the sigmoid of larger logits


def test_generate_returns_hidden_states(model):
    output = model.generate(
        IDS,
        max_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_scores=True,
    )
    assert [states[-1].shape[1] for states in output.hidden_states] == [12, 1, 1]
    scores = model.lm_head(output.hidden_states[2][-1])[:, -1]
    torch.testing.assert_close(scores, output.scores[2])


@pytest.mark.parametrize("layers", [["r", "r"], ["mamba2"], ["r", "4"]], ids=["mamba", "mamba2", "mixture"])
def test_generation_skips_what_the_state_has_seen(layers):
    model, options = build(layers), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **options)[:, -4:]
    for ids in (IDS, IDS[:, 7:]):  # the whole prompt again, or only what is new
        cache = model(IDS[:, :7], use_cache=True).get(CACHE)
        got = model.generate(ids, attention_mask=torch.ones_like(IDS), **{CACHE: cache}, **options)
        assert torch.equal(got[:, -4:], expected)


def test_both_names_of_the_cache_are_one_argument(model):
    first = model(IDS[:, :5], use_cache=True)
    cache = first.get(CACHE)
    expected = model(IDS[:, 5:], cache=model(IDS[:, :5], use_cache=True).get(CACHE)).logits
    with pytest.raises(ValueError, match="two names of one argument"):
        model(IDS[:, 5:], cache=cache, past_key_values=cache)
    assert torch.equal(model(IDS[:, 5:], past_key_values=cache).logits, expected)


def test_use_in_their_own_names_warns_of_nothing(model):
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = model(IDS[:, :5], use_cache=True, output_hidden_states=True).get(CACHE)
            options = {"pad_token_id": 0, "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
            model.generate(IDS, attention_mask=torch.ones_like(IDS), **{CACHE: cache}, **options)
            model(IDS, labels=IDS).loss.backward()
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert said.getvalue() == ""


def test_versions_out_of_the_tried_range_are_named(caplog):
    logging.getLogger("transformers").addHandler(caplog.handler)
    for _ in range(2):
        compare_versions("99.1.0")
    compare_versions(TRIED[0]), compare_versions(TRIED[1] + ".post1")
    logging.getLogger("transformers").removeHandler(caplog.handler)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{TRIED[0]} to {TRIED[1]}" in said and "99.1.0" in said and "export refresh" in said
    with pytest.raises(ImportError, match="needs transformers 4"):
        compare_versions("4.49.0")


def test_generation_goes_on_from_embeddings(model):
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **options)[:, -4:]
    cache = model(IDS[:, :7], use_cache=True).get(CACHE)
    embeds = model.get_input_embeddings()(IDS)
    mask = torch.ones_like(IDS)
    got = model.generate(inputs_embeds=embeds, attention_mask=mask, **{CACHE: cache}, **options)
    assert torch.equal(got[:, -4:], expected)


def test_only_new_embeddings_are_read(model):
    cache = model(IDS[:, :7], use_cache=True).get(CACHE)
    embeds = model.get_input_embeddings()(IDS)
    for news in ({"cache_position": torch.arange(7, 12)}, {"next_sequence_length": 5}):  # 4.x and 5.x say it so
        inputs = model.prepare_inputs_for_generation(
            IDS[:, :0], cache=cache, inputs_embeds=embeds, is_first_iteration=True, **news
        )
        assert torch.equal(inputs["inputs_embeds"], embeds[:, 7:])


@pytest.mark.parametrize("cut", [None, 5, 6, 9])
def test_packed_documents_do_not_see_each_other(model, cut):
    lengths = [6, 4, 2]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    alone = torch.cat([model(part).logits for part in IDS[:1].split(lengths, dim=1)], dim=1)
    if cut is None:
        packed = model(IDS[:1], position_ids=positions).logits
    else:
        first = model(IDS[:1, :cut], position_ids=positions[:, :cut], use_cache=True)
        second = model(IDS[:1, cut:], position_ids=positions[:, cut:], cache=first.get(CACHE))
        packed = torch.cat((first.logits, second.logits), dim=1)
    torch.testing.assert_close(packed, alone, atol=3e-5, rtol=3e-5)
    assert (model(IDS[:1]).logits - alone).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [(0, 6), (2, 0)])
def test_empty_input_is_refused(model, shape):
    with pytest.raises(ValueError, match=r"there are no tokens: \(batch, tokens\) is"):
        model(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("shape", [(1, 5), (1, 7), (2, 6), (1, 1, 6, 6)])
def test_mask_of_another_shape_is_refused(model, shape):
    with pytest.raises(ValueError, match=r"attention_mask has the shape .* which is \(1, 6\)"):
        model(torch.arange(6)[None], attention_mask=torch.ones(shape))


def test_a_hole_in_the_mask_is_refused(model):
    mask = torch.ones_like(IDS)
    mask[1, 4] = 0
    with pytest.raises(ValueError, match="has a hole"):
        model(IDS, attention_mask=mask)
    mask[1, :4] = 0  # padding at the left, or at the right, is accepted
    model(IDS, attention_mask=mask)
    model(IDS, attention_mask=mask.flip(1))


def test_dynamic_quantization_replaces_every_product():
    model = build(KINDS["hybrid"])
    before = model(IDS).logits
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    left = {name.split(".")[-1] for name, part in quantized.named_modules() if isinstance(part, torch.nn.Linear)}
    assert left == {"router"}  # its fp32 product decides the expert
    difference = (quantized(IDS).logits - before).norm() / before.norm()
    assert 0 < difference < 0.3


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_an_exported_graph_gives_the_same_logits(kernels, gradients):
    model = build(KINDS["hybrid"], kernels=kernels)
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
        other = IDS.flip(0, 1)
        torch.testing.assert_close(program.module()(other, use_cache=False).logits, model(other).logits)


@pytest.mark.parametrize(("layers", "graphs"), [(["r"] * 4, 1), (KINDS["transformer"], 1), (["r", "4"] * 4, 10)])
def test_compilation_needs_few_graphs(layers, graphs):
    model = build(layers)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    with torch.no_grad():
        compiled = torch.compile(model, backend=counter)(IDS, use_cache=False).logits
        torch.testing.assert_close(compiled, model(IDS).logits)
    assert counter.frame_count <= graphs


def without_prefix(folder, target):
    """An export as earlier versions wrote it, with the released names alone."""
    model = hf.read(folder)
    target.mkdir()
    for file in folder.iterdir():
        if not file.name.startswith("model."):
            (target / file.name).write_bytes(file.read_bytes())
    hf.safetensors_io.write(target / "model.safetensors", model.entries)
    return target


def test_older_exports_load(export, silu, tmp_path):
    folder, older = export(silu), without_prefix(export(silu), tmp_path / "older")
    for auto in (AutoModel, AutoModelForCausalLM):
        ours, theirs = (auto.from_pretrained(place, trust_remote_code=True) for place in (folder, older))
        assert torch.equal(ours(IDS)[0], theirs(IDS)[0])
    assert list(hf.read(older).entries) == list(hf.read(folder).entries)


def test_a_saved_output_layer_must_be_the_embedding(export, silu, tmp_path):
    folder = without_prefix(export(silu), tmp_path / "folder")
    entries = dict(hf.read(folder).entries)
    embedding = entries["embedding.word_embeddings.weight"]
    hf.safetensors_io.write(folder / "model.safetensors", {**entries, "lm_head.weight": embedding})
    assert hf.read(folder).entries.keys() == entries.keys()
    other = entries["decoder.layers.0.mixer.in_proj.weight"]
    hf.safetensors_io.write(folder / "model.safetensors", {**entries, "lm_head.weight": other})
    with pytest.raises(InterchangeError, match="differs from the embedding"):
        hf.read(folder)
