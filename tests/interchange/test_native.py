"""Models of other families: transformers' own, randomly initialised, in and out again, without our code."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import convert, hf, megatron, native, open, witness
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.families import FAMILIES
from megatron_blackmamba.interchange.hf import INDEX
from megatron_blackmamba.interchange.native import nemotron_h
from tests.interchange import native_matrix
from tests.interchange.continued_probe import RUNS, STEPS
from tests.interchange.native_grid import (
    NORMS_GROUPS,
    ODD,
    SIZES,
    WHY_NOT_GROUPS,
    differences,
    random_differences,
    tensors,
    write_extra_depth,
    write_model,
)
from tests.reference import tiny
from tests.reference.canonical import canonical
from tests.runtime.ranks import fork_script
from tests.thorough import thorough

TOKENS = torch.arange(2 * 21).view(2, 21) * 7 % 60


@pytest.fixture(scope="module", params=ODD)
def theirs(request, tmp_path_factory):
    return write_model(request.param, tmp_path_factory.mktemp("native") / request.param)


@pytest.fixture(scope="module")
def back(theirs):
    """The model as our checkpoint, and that as a model of transformers."""
    checkpoint, out = theirs.parent / "checkpoint", theirs.parent / "back"
    convert.to_checkpoint(native.read(theirs), checkpoint, verify=False)
    convert.to_hf(open.open_model(checkpoint), out, as_native=True, check="none", shard_bytes=20_000)
    return out


@pytest.fixture
def right_groups(request):
    params = request.node.callspec.params
    if params.get("theirs", params.get("model_type")) in ("mamba2", "granitemoehybrid") and not NORMS_GROUPS:
        pytest.skip(WHY_NOT_GROUPS)


@pytest.mark.usefixtures("right_groups")
def test_imported_model_computes_as_in_transformers(theirs, tmp_path):
    logits, gradients = differences(shutil.copytree(theirs, tmp_path / "model"))
    assert logits < 1e-5 and gradients < 1e-5


@thorough
@pytest.mark.usefixtures("right_groups")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model_type", ODD)
def test_random_models_compute_as_in_transformers(model_type, seed, tmp_path):
    assert max(random_differences(model_type, seed, tmp_path / "model")) < 1e-5


def test_bound_of_time_steps_is_imported(tmp_path):
    keys = {**SIZES, **ODD["nemotron_h"], "time_step_min": 0.1}
    folder = write_model("nemotron_h", tmp_path / "model", **keys)
    assert native.read(folder).config.mamba2.time_step_min == 0.1
    assert max(differences(folder)) < 1e-5


def test_imported_weights_are_exported_bit_exactly(theirs, back):
    before, after = tensors(theirs), tensors(back)
    assert before.keys() == after.keys() and len(list(back.glob("*.safetensors"))) > 1
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("right_groups")
@torch.no_grad()
def test_export_writes_the_same_text_without_code(back):
    assert not list(back.glob("*.py")) and "auto_map" not in json.loads((back / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(back, trust_remote_code=False, dtype=torch.float32).eval()
    assert not type(model).__module__.startswith("transformers_modules")
    decoder = Decoder(pack(native.read(back), torch.float32))
    state = decoder.start(2)
    logits = decoder.read_all(state, TOKENS)
    torch.testing.assert_close(logits, model(TOKENS).logits, atol=1e-5, rtol=0)
    written = [logits[:, -1].argmax(-1)]
    for _ in range(7):
        written.append(decoder.step(state, written[-1]).argmax(-1))
    expected = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=8, do_sample=False)
    assert torch.stack(written, dim=1).tolist() == expected[:, TOKENS.shape[1] :].tolist()


@thorough
def test_commands_go_both_ways_and_transformers_agrees(tmp_path):
    folder = write_model("nemotron_h", tmp_path / "model")
    (folder / "chat_template.jinja").touch()
    for command, note in (
        (["import", "hf", folder, "checkpoint"], "leaves out "),
        (["export", "hf", "checkpoint", "ours", "--check", "none"], "--native writes a nemotron_h of transformers"),
        (["export", "hf", "checkpoint", "out", "--native"], ""),
    ):
        told = CliRunner().invoke(
            app, [str(tmp_path / word) if word in ("checkpoint", "ours", "out") else str(word) for word in command]
        )
        assert told.exit_code == 0 and note in told.output, told.output
    assert "top-1 agreement 144/144, same greedy token 16/16 (loaded by transformers" in told.output


def changed(folder: Path, out: Path, **changes) -> Path:
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changes))
    return out


def test_every_tensor_of_the_source_is_accounted_for(theirs, tmp_path):
    folder = changed(theirs, tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())
    name = next(name for name in index["weight_map"] if "norm" in name)
    file = folder / index["weight_map"][name]
    held = load_file(file)
    extra = {**held, "left.over": torch.zeros(1)}
    short = {**held, name: held[name][:-1].clone()}
    for weights, told in ((extra, "holds left.over, which a"), (short, f"{name} is .*; its config says")):
        save_file(weights, file, {"format": "pt"})
        places = {**index["weight_map"], **dict.fromkeys(weights, file.name)}
        (folder / INDEX).write_text(json.dumps({**index, "weight_map": places}))
        with pytest.raises(InterchangeError, match=told):
            native.read(folder)


def test_truncated_shards_and_nan_are_named_without_leftovers(theirs, tmp_path):
    folder = changed(theirs, tmp_path / "model")
    file = sorted(folder.glob("*.safetensors"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-40])
    with pytest.raises(InterchangeError, match=rf"{file.name}: not a complete safetensors file"):
        native.read(folder)
    held = load_file(theirs / file.name)
    name = next(iter(held))
    held[name].view(-1)[0] = torch.nan
    save_file(held, file, {"format": "pt"})
    with pytest.raises(InterchangeError, match="holds NaN or infinity"):
        convert.to_checkpoint(native.read(folder), tmp_path / "out", verify=False)
    assert not [path for path in tmp_path.iterdir() if path != folder]


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("mamba", {"use_bias": True}, "use_bias is True; only False converts"),
        ("mamba", {"num_hidden_layers": 3}, r"has no backbone\.layers\.2\.norm\.weight, which its config requires"),
        ("mamba", {"num_hidden_layers": "x"}, "num_hidden_layers is 'x', not a number of layers"),
        ("mamba", {"num_hidden_layers": True}, "num_hidden_layers is True, not a number of layers"),
        ("mamba2", {"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0\.0, 1\.0\]; only"),
        ("nemotron_h", {"moe_latent_size": 8}, "fc1_latent_proj.weight is 16×24; its config says 8×24"),
        ("nemotron_h", {"layers_block_type": ["moe", "rnn"]}, "layers_block_type has 'rnn'; a layer is one of"),
        ("nemotron_h", {"num_hidden_layers": 3}, "num_hidden_layers is 3, and layers_block_type is"),
        ("nemotron_h", {"time_step_min": "x"}, "time_step_min is 'x', a str"),
        ("llama", {"rope_theta": "x", "rope_parameters": None}, "rope_theta is 'x'; only whole numbers"),
        ("llama", {"rope_theta": 10000.5, "rope_parameters": None}, r"rope_theta is 10000\.5; only whole numbers"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "only plain rotary positions convert"),
        ("llama", {"attention_bias": True}, "attention_bias is True; only False converts"),
        ("llama", {"new_key": 3}, "new_key is 3, which import does not know for llama"),
        ("llama", {"hidden_size": "wide"}, "hidden_size: Input should be a valid integer"),
        ("granitemoehybrid", {"mamba_expand": "x"}, "mamba_expand is 'x', not a whole number above 0"),
        ("granitemoehybrid", {"layer_types": ["rnn"] * 3}, "layer_types has 'rnn'; a layer is one of"),
        ("granitemoehybrid", {"mamba_conv_bias": False}, "mamba_conv_bias is False; only True converts"),
        ("nemotron_h", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; transformers then gives .* the weight 1"),
        ("mixtral", {"num_experts_per_tok": 1}, "with model.top_k=1 every weight is 1"),
        ("granitemoehybrid", {"num_experts_per_tok": 1}, "with model.top_k=1 every weight is 1"),
        ("mixtral", {"sliding_window": 64}, "sliding_window is 64; only None converts"),
        ("mixtral", {"model_type": "falcon"}, "model_type is 'falcon'; import reads mamba, mamba2"),
    ],
)
def test_inconvertible_model_is_named_by_key_and_value(model_type, changes, told, tmp_path_factory, tmp_path):
    folder = tmp_path_factory.getbasetemp() / f"plain_{model_type}"
    if not folder.exists():
        write_model(model_type, folder)
    with pytest.raises(InterchangeError, match=rf"^{tmp_path}.*{told}"):
        native.read(changed(folder, tmp_path / "model", **changes))


def test_older_name_of_head_dim_is_read(tmp_path):
    keys = {**SIZES, **ODD["nemotron_h"]}
    folder = write_model("nemotron_h", tmp_path / "model", **keys)
    file = folder / "config.json"
    content = json.loads(file.read_text())
    older = {**content, "attention_head_dim": content["head_dim"]}
    file.write_text(json.dumps({key: value for key, value in older.items() if key != "head_dim"}))
    assert native.read(folder).config.attention.head_dim == keys["head_dim"]
    file.write_text(json.dumps(older | {"head_dim": 128}))
    with pytest.raises(InterchangeError, match="head_dim and attention_head_dim differ"):
        native.read(folder)


def test_import_names_an_extra_depth_it_leaves_out(tmp_path):
    folder = write_model("nemotron_h", tmp_path / "model")
    file = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(file) | {"mtp.layers.0.eh_proj.weight": torch.ones(3)}, file, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["mtp.layers.0.eh_proj.weight"] = file.name
    (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    result = CliRunner().invoke(app, ["import", "hf", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert f"leaves out 1 tensors of {folder}: mtp.layers.0.eh_proj.weight" in result.output


def test_import_is_checked_by_transformers_own_class(tmp_path, monkeypatch):
    keys = {**SIZES, **ODD["nemotron_h"]}
    folder = write_model("nemotron_h", tmp_path / "right", **keys)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran')")  # which an import never runs
    dense = write_model("llama", tmp_path / "dense")
    for source, more in ((folder, []), (dense, ["--dtype", "bf16", "--experts", "4"])):
        told = CliRunner().invoke(app, ["import", "hf", str(source), str(tmp_path / f"good{len(more)}"), *more])
        assert told.exit_code == 0, told.output
        assert "top-1 agreement 128/128 (loaded by transformers 5" in told.output
    monkeypatch.delattr(nemotron_h.NemotronH, "imported")  # so that a weight is wrong which our two readers agree on
    folder = write_model("nemotron_h", tmp_path / "wrong", **{**keys, "num_experts_per_tok": 1})
    with pytest.raises(witness.WitnessError, match=r"wrong: this package computes something else .* difference \d"):
        CliRunner().invoke(app, ["import", "hf", str(folder), str(tmp_path / "bad")], catch_exceptions=False)
    assert not (tmp_path / "bad").exists()


WITHOUT_MAMBA = "import transformers\ntransformers.CONFIG_MAPPING._mapping.pop('mamba')\n"
WITHOUT_GROUPS = """
from transformers.models.mamba2 import modeling_mamba2

kind = modeling_mamba2.MambaRMSNormGated
before = kind.__init__


def after(self, *words, **named):
    before(self, *words, **named)
    self.__dict__.pop("group_size", None)


kind.__init__ = after
"""


@pytest.mark.parametrize("reason", ["class", "groups", "memory", "export"])
def test_import_says_when_transformers_was_not_asked(reason, tmp_path, monkeypatch):
    family = "mamba2" if reason == "groups" else "mamba"
    keys = {**SIZES, **ODD[family], "num_hidden_layers": 1}
    if reason == "export":
        hf.write(canonical(tiny("silu")), folder := tmp_path / "model")
        expected = "transformers does not read these files by itself"
    else:
        folder = write_model(family, tmp_path / "model", **keys)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (tmp_path / "sitecustomize.py").write_text({"class": WITHOUT_MAMBA, "groups": WITHOUT_GROUPS}.get(reason, ""))
        expected = r"transformers 5.* has no class for mamba"
        if reason == "groups":
            expected += "2 with 2 groups, which it normalises as one"
    if reason == "memory":
        monkeypatch.setattr(witness.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        expected = "the whole model does not fit into the free memory"
    found = convert.to_checkpoint(open.open_export(folder), tmp_path / "out", original=folder)
    assert re.search(rf"\(loaded by this package alone, since {expected}\)$", str(found))


@pytest.mark.xdist_group("layouts")
def test_continued_training_is_equal_on_other_layouts(tmp_path):
    keys = {**SIZES, **ODD["nemotron_h"], "mamba_num_heads": 4, "n_groups": 2, "n_routed_experts": 4}
    source = write_extra_depth(tmp_path / "model", **{**keys, "vocab_size": 64})
    convert.to_checkpoint(native.read(source), tmp_path / "start", verify=False)
    assert fork_script("tests.interchange.continued_probe", str(tmp_path)) == {}
    alone, *others = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in RUNS
    )
    assert len(alone) == STEPS and alone[0]["loss"] != alone[-1]["loss"]
    for name, many in zip([*RUNS][1:], others, strict=True):
        for key in ("loss", "mtp_loss", "grad_norm"):
            closeness = 1e-4 if name.startswith("fp32") else 1e-10
            assert [step[key] for step in many] == pytest.approx([step[key] for step in alone], abs=closeness)
    trained = megatron.read(tmp_path / "fp32_pp2")
    convert.to_hf(trained, tmp_path / "back", as_native=True, check="none")
    before, after = tensors(source), tensors(tmp_path / "back")
    ahead = [name for name in after if name.startswith("mtp.")]
    assert before.keys() == after.keys() and len(ahead) == 24
    assert not any(torch.equal(before[name], after[name]) for name in ahead)
    back = native.read(tmp_path / "back").entries
    assert back.keys() == trained.entries.keys()
    assert all(torch.equal(entry.load(), back[name].load()) for name, entry in trained.entries.items())


LENGTHS = {"mamba": None, "mamba2": None, "nemotron_h": 2**20, "llama": 21, "granitemoehybrid": 21, "mixtral": 21}


def test_every_family_is_tested():
    assert set(ODD) == set(LENGTHS) == set(FAMILIES) <= set(native_matrix.FAMILIES)


def test_only_rotary_positions_limit_a_native_export(theirs, tmp_path):
    """A recurrence and attention without positions have no longest sequence; the card names the family."""
    convert.to_hf(replace(native.read(theirs), sequence_length=21), tmp_path / "out", as_native=True, check="none")
    config = json.loads((tmp_path / "out/config.json").read_text())
    rotates = config.get("position_embedding_type") != "nope"
    assert config.get("max_position_embeddings") == (LENGTHS[theirs.name] if rotates else 2**20)
    assert native.read(tmp_path / "out").sequence_length == (
        21 if config.get("max_position_embeddings") == 21 else 2048
    )
    assert not re.search("^# BlackMamba", (tmp_path / "out/README.md").read_text(), re.MULTILINE)
