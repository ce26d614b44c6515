"""Which models are native, what is in the way, and the original files of state-spaces/mamba."""

import json

import pytest
import torch
from transformers import AutoConfig

from megatron_blackmamba.config import load
from megatron_blackmamba.interchange import convert, megatron, native, through_megatron
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.native.base import WITHOUT_EFFECT
from megatron_blackmamba.interchange.upcycle import upcycled
from tests.interchange.native_grid import ODD, SIZES, tensors, write_model

RMS = ["model.final_norm=rms"]
LLAMA = [*RMS, 'model.pattern="*-*-"', "model.mlp_hidden_size=64", "model.attention.heads=4"]
MIXTRAL = [*RMS, 'model.pattern="*E"', "model.attention.heads=4", "model.top_k=2", "model.router.kind=softmax"]
NEMOTRON = [
    *("model.pattern=SE*-", "model.mamba2.head_dim=16", "model.attention.heads=4", "model.mlp_hidden_size=64"),
    *("model.attention.rotary=false", "model.activation=relu2", "model.gated=false", "model.tie_embeddings=false"),
    *("model.router.kind=expert_bias", "model.router.bias=false", "model.top_k=2", *RMS),
    "model.shared_expert_hidden_size=64",
]

GRANITE = [
    *("model.pattern=SE*E", "model.mamba2.head_dim=16", "model.attention.heads=4", "model.top_k=2", *RMS),
    *("model.router.kind=softmax", "model.router.normalize=true", "model.router.bias=false"),
    *("model.multipliers.embedding=12", "model.multipliers.attention=0.1", "model.multipliers.residual=0.22"),
    "model.shared_expert_hidden_size=64",
]


@pytest.mark.parametrize(
    ("overrides", "model_type"),
    [
        (["model.pattern=MMM", *RMS], "mamba"),
        (["model.pattern=SS", "model.mamba2.head_dim=16", *RMS], "mamba2"),
        (LLAMA, "llama"),
        ([*MIXTRAL, "model.router.normalize=true", "model.router.bias=false"], "mixtral"),
        (NEMOTRON, "nemotron_h"),
        ([*NEMOTRON, "model.pattern=SE*", "model.mlp_hidden_size=null"], "nemotron_h"),
        ([*GRANITE, "model.multipliers.logits=6"], "granitemoehybrid"),
        ([*GRANITE, "model.pattern=S-*-", "model.mlp_hidden_size=64"], "granitemoehybrid"),
        ([*GRANITE, "model.pattern=*-*-", "model.mlp_hidden_size=64"], "granitemoehybrid"),
    ],
)
def test_these_settings_make_a_native_model(overrides, model_type):
    model = load("tiny", overrides).model
    architecture, obstacles = native.nearest(model)
    assert (architecture.model_type, obstacles) == (model_type, [])
    config = AutoConfig.for_model(model_type, **architecture.exported(model))  # which checks the types of values
    assert config.vocab_size == model.vocab_size


def test_model_without_experts_has_no_keys_of_them():
    model = load("tiny", [*NEMOTRON, "model.pattern=S*-"]).model
    architecture, obstacles = native.nearest(model)
    keys = architecture.exported(model)
    assert (architecture.model_type, obstacles) == ("nemotron_h", [])
    assert not [key for key in keys if key.startswith(("moe_", "num_experts", "n_routed"))]
    assert AutoConfig.for_model("nemotron_h", **keys).intermediate_size == model.mlp_hidden_size


@pytest.mark.parametrize("family", native.ARCHITECTURES, ids=lambda family: family.model_type)
def test_keys_a_file_lacks_have_defaults_that_convert(family):
    """A config.json may leave out what equals its class's default, so a missing key must mean what import assumes."""
    theirs = json.loads(AutoConfig.for_model(family.model_type).to_json_string(use_diff=False))
    one_value = {**{key: (value,) for key, value in family.fixed.items()}, **family.only}
    assert {key: theirs[key] for key, values in one_value.items() if theirs.get(key, values[0]) not in values} == {}
    known = {*family.fields, *one_value, *family.ignored, *WITHOUT_EFFECT}
    assert [key for key, value in theirs.items() if value is True and key not in known] == []  # False would pass


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.pattern=MM"], "not quite a mamba of transformers: model.final_norm=layer: set rms"),
        ([*LLAMA, "model.logit_softcap=30"], "a llama of transformers: model.logit_softcap=30.0: set null"),
        ([*LLAMA, "model.attention.qk_norm=true"], "model.attention.qk_norm=true: set false"),
        ([*MIXTRAL], "model.router.bias=true: set false; model.router.normalize=false: set true"),
        ([*NEMOTRON, "model.top_k=1"], "model.top_k=1: set 2 or more"),
        ([*NEMOTRON, "model.pattern=SE-"], "writes no text without an attention layer"),
        ([*GRANITE, "model.shared_expert_hidden_size=null"], "granitemoehybrid .*shared_expert_hidden_size=null: set"),
        ([*GRANITE, "model.pattern=SE", "model.multipliers.attention=null"], "writes no text without an attention"),
        ([*GRANITE, "model.mamba2.heads=5"], "model.mamba2.heads × head_dim = 80: set a multiple of model.hidden_size"),
        (["model.pattern=ME"], "model.pattern=ME is in no architecture of transformers: mamba \\(repeat M\\)"),
        (["model.pattern=MM", *RMS, "model.eod_reset=5"], "model.eod_reset=5: set null"),
        (["model.pattern=MM", *RMS, "model.multipliers.residual=2"], r"model.multipliers.residual=2\.0: set 1\.0"),
    ],
)
def test_what_keeps_model_from_being_native_is_named(overrides, told):
    with pytest.raises(InterchangeError, match=told):
        native.architecture_of(load("tiny", overrides).model, "runs/tiny")


def write_original(folder, model_type, **config):
    """The files of state-spaces/mamba: their names, their config, and a head that copies the embedding."""
    source = write_model(
        model_type, folder / "transformers", **{**SIZES, **ODD[model_type], "tie_word_embeddings": True}
    )
    weights = {name.replace("embeddings.", "embedding."): value for name, value in tensors(source).items()}
    weights["lm_head.weight"] = weights["backbone.embedding.weight"].clone()
    original = folder / "original"
    original.mkdir()
    torch.save(weights, original / "pytorch_model.bin")
    about = {"d_model": 24, "n_layer": 2, "vocab_size": 57, "rms_norm": True, "residual_in_fp32": True}
    about |= {"fused_add_norm": True, "pad_vocab_size_multiple": 4}
    (original / "config.json").write_text(json.dumps(about | config))
    return source, original


SSM = {
    "mamba": {"d_state": 6, "dt_rank": 5, "expand": 3},
    "mamba2": {"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2},
}


@pytest.mark.parametrize("model_type", SSM)
def test_original_files_of_state_spaces_are_read(model_type, tmp_path):
    source, original = write_original(tmp_path, model_type, ssm_cfg=SSM[model_type])
    assert native.is_native(original)
    expected, found = native.read(source), native.read(original)
    assert native.base.resolved(found.config) == native.base.resolved(expected.config)
    assert all(torch.equal(value, found.entries[name].load()) for name, value in expected.tensors())
    convert.to_hf(found, tmp_path / "out", as_native=True, check="none")
    assert all(torch.equal(value, tensors(source)[name]) for name, value in tensors(tmp_path / "out").items())
    for key, value, told in [
        ("rms_norm", False, "rms_norm is False; only True converts"),
        ("attn_layer_idx", [1], r"attn_layer_idx is \[1\]; only"),
        ("ssm_cfg", {"layer": "Mamba3"}, "ssm_cfg.layer is 'Mamba3'; only Mamba1 and Mamba2"),
        ("vocab_size", "x", "vocab_size is 'x', not a whole number above 0"),
        ("ssm_cfg", {"layer": "Mamba2", "expand": "x"}, "expand is 'x', not a whole number above 0"),
        ("ssm_cfg", {"A_init": 1}, "ssm_cfg.A_init is 1, which import does not know"),
    ]:
        config = json.loads((original / "config.json").read_text())
        (original / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(InterchangeError, match=told):
            native.read(original)
        (original / "config.json").write_text(json.dumps(config))


def test_keys_without_effect_on_outputs_are_passed_over(tmp_path):
    """Codestral Mamba has such keys. Of other keys all are named at once."""
    folder = write_model("mamba2", tmp_path / "model", **SIZES, **ODD["mamba2"])
    config = json.loads((folder / "config.json").read_text())
    before = native.read(folder).config
    more = {"intermediate_size": 8192, "time_step_init_scheme": "random", "time_step_scale": 1.0}
    (folder / "config.json").write_text(json.dumps(config | more))
    assert native.read(folder).config == before
    (folder / "config.json").write_text(json.dumps(config | {"one": 1, "two": "2"}))
    with pytest.raises(InterchangeError, match="one is 1, two is '2', which import does not know for mamba2"):
        native.read(folder)


@pytest.mark.parametrize("model_type", ["llama", "nemotron_h"])
def test_upcycled_model_computes_as_its_source(model_type, tmp_path):
    keys = {**SIZES, **ODD[model_type]} | ({"hybrid_override_pattern": "M*-"} if model_type == "nemotron_h" else {})
    source = native.read(write_model(model_type, tmp_path / "model", **keys))
    convert.to_checkpoint(upcycled(source, experts=4, top_k=3), tmp_path / "checkpoint", verify=False)
    found, tokens = megatron.read(tmp_path / "checkpoint"), torch.arange(40).view(2, 20)
    assert found.config.pattern == source.config.pattern.replace("-", "E")
    expected, got = (through_megatron.observe(model, tokens) for model in (source, found))
    torch.testing.assert_close(got.logits_BSV, expected.logits_BSV, atol=1e-5, rtol=0)
    assert len({tuple(row) for row in got.routers[0].choice_BSK.flatten(0, 1).tolist()}) > 1
    if model_type == "llama":
        assert native.nearest(found.config)[0].model_type == "mixtral" and not native.nearest(found.config)[1]
    for experts, top_k, told in [(4, 5, "--top-k 5 of --experts 4"), (4, 1, "give 2 to 4")]:
        with pytest.raises(InterchangeError, match=told):
            upcycled(source, experts, top_k)
    with pytest.raises(InterchangeError, match="upcycling needs dense MLPs"):
        upcycled(found, 4, 2)
