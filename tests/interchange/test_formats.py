"""The released format and Hugging Face folders: what goes in comes out, and what is wrong is refused by name."""

import json
import pickle
import struct
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megatron_blackmamba.checkpoint.manifest import DamagedCheckpoint
from megatron_blackmamba.checkpoint.reading import find_checkpoint
from megatron_blackmamba.cli import app
from megatron_blackmamba.interchange import convert, hf, torch_file, zyphra
from megatron_blackmamba.interchange.canonical import InterchangeError, Past, cast, in_memory, shapes
from megatron_blackmamba.interchange.open import open_model
from tests.interchange.test_checkpoints import assert_same
from tests.reference import tiny, write_released
from tests.reference.canonical import canonical, config_of
from tests.reference.checkpoint import released_shapes


@pytest.fixture
def released(silu, tmp_path):
    return write_released(tmp_path / "released", silu)


def change_config(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def save(folder, content):
    torch.save(content, folder / "pytorch_model.bin")


def test_safetensors_reads_every_shard_of_the_index(silu, tmp_path):
    model = canonical(silu)
    hf.write(model, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / hf.INDEX).read_text())
    shards = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert {name: file for file, tensors in shards.items() for name in tensors} == index["weight_map"]
    found = [tensor for tensors in shards.values() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found)
    assert len(found) > 20 and all(tensor.isfinite().all() for tensor in found)


def test_requested_precision_spares_the_recurrence(silu, tmp_path):
    convert.to_hf(canonical(silu), tmp_path / "out", dtype=torch.bfloat16, check="none")
    types = {name: entry.dtype for name, entry in hf.read(tmp_path / "out").entries.items()}
    assert types["decoder.layers.0.mixer.A_log"] == types["decoder.layers.2.mixer.dt_proj.bias"] == torch.float32
    assert types["decoder.layers.0.mixer.in_proj.weight"] == torch.bfloat16


def test_index_of_one_file_is_read(silu, tmp_path):
    hf.write(canonical(silu), tmp_path)
    names = hf.in_file(canonical(silu))
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert hf.read(tmp_path).parameters == canonical(silu).parameters


def test_released_loader_s_rules_hold(silu, tmp_path):
    """The released code reads config.json, makes the modules it tells of, and loads "model" with strict names."""
    zyphra.write(canonical(silu), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    loaded = torch.load(tmp_path / "pytorch_model.bin", map_location="cpu")  # weights_only is torch's default
    state = loaded["model"]
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in state.values())
    embedding = state.pop("embedding.word_embeddings.weight").clone()
    made = torch.nn.Module()
    for name, shape in released_shapes(config).items():
        *modules, last = name.split(".")
        inner = made
        for part in modules:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        if name == "embedding.word_embeddings.weight":  # there it is embedding.weight, and the output layer's
            made.embedding.weight = torch.nn.Parameter(torch.empty(shape))
            made.output_layer = torch.nn.Linear(shape[1], shape[0], bias=config["add_bias_linear"])
        else:
            inner.register_parameter(last, torch.nn.Parameter(torch.empty(shape)))
    state |= {"embedding.weight": embedding, "output_layer.weight": embedding}
    made.load_state_dict(state, strict=True)
    assert all(torch.equal(state[name], weight) for name, weight in silu.weights.items() if name in state)
    assert torch.equal(made.decoder.final_layernorm.bias, silu.weights["decoder.final_layernorm.bias"])


def test_both_checksums_of_a_storage_are_written(silu, tmp_path):
    """A zip file has each twice; tools that read it as a stream check the one behind the data."""
    zyphra.write(canonical(silu), tmp_path)
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin") as archive:
        storages = [record for record in archive.infolist() if "/data/" in record.filename]
    for record in storages:
        name_bytes, extra_bytes = struct.unpack_from("<HH", content, record.header_offset + 26)
        end = record.header_offset + 30 + name_bytes + extra_bytes + record.file_size
        assert content[end : end + 4] == b"PK\x07\x08"
        assert struct.unpack_from("<I", content, end + 4) == (record.CRC,)
    assert len(storages) > 10


def test_released_config_says_what_released_code_reads(silu, tmp_path):
    zyphra.write(canonical(silu), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {key: value for key, value in silu.config.items() if key not in ("activation", "eod_reset")}


def test_released_files_default_to_gelu_with_a_reason(released):
    assert zyphra.read(released).config.activation == "gelu"
    assert "erf-GELU" in zyphra.choose_activation(released).reason
    assert zyphra.read(released, activation="silu").config.activation == "silu"


def test_silu_export_warns_and_records_the_activation(silu, tmp_path):
    zyphra.write(canonical(silu), tmp_path)
    assert "always gates with erf-GELU" in zyphra.warning_about(config_of(silu))
    assert json.loads((tmp_path / "blackmamba.json").read_text())["activation"] == "silu"
    assert zyphra.read(tmp_path).config.activation == "silu"
    assert zyphra.warning_about(config_of(tiny("gelu"))) is None


@pytest.mark.parametrize(
    ("field", "value"), [("experts", 10), ("experts", 1), ("dt_rank", 3), ("eod_reset", 0), ("norm_eps", 1e-6)]
)
def test_values_without_a_released_field_are_refused(silu, tmp_path, field, value):
    config = config_of(silu).model_copy(update={field: value})
    weights = {name: torch.zeros(shape) for name, shape in shapes(config).items()}
    with pytest.raises(InterchangeError, match=f"model.{field} is {value}"):
        convert.to_zyphra(in_memory(config, weights), tmp_path / "out", verify=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mamba_moe_layers": ...}, "mamba_moe_layers"),
        ({"mamba_moe_layers": ["r", "4", "r", "z"]}, "mamba_moe_layers"),
        ({"mamba_moe_layers": ["r", "4", "r", "2"]}, "mamba_moe_layers"),
        ({"mamba_moe_layers": "r4r4"}, "mamba_moe_layers"),
        ({"num_layers": 6}, "num_layers"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": 48}, "embedding.word_embeddings.weight"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"ffn_hidden_size": 50}, "linear_fc1.weight"),
        ({"state_size": -1}, "state_size"),
        ({"add_bias_linear": True}, "add_bias_linear"),
        ({"swiglu": False}, "swiglu"),
        ({"conv_dimension": 3}, "conv1d.weight"),
    ],
)
def test_wrong_or_mismatched_config_names_file_and_field(released, tmp_path, changes, named):
    change_config(released, **changes)
    with pytest.raises(InterchangeError, match=named) as refusal:
        convert.to_hf(zyphra.read(released), tmp_path / "out")
    assert str(released) in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_config_may_lack_the_number_of_layers(released, silu):
    change_config(released, num_layers=...)
    assert zyphra.read(released).config.pattern == canonical(silu).config.pattern


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickle_with_code_is_refused_without_running(released, tmp_path, silu):
    content = {"model": {**silu.weights, "decoder.final_layernorm.bias": RunsCode(tmp_path / "ran")}}
    for write in (save, lambda folder, c: (folder / "pytorch_model.bin").write_bytes(pickle.dumps(c["model"]))):
        write(released, content)
        with pytest.raises(InterchangeError, match=r"pytorch_model\.bin: refused: .*could run code"):
            zyphra.read(released)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [None, "long", 0, 1.5, True])
def test_a_length_that_is_no_number_is_refused(released, silu, tmp_path, length):
    hf.write(canonical(silu), tmp_path / "hf")
    for form, folder in ((hf, tmp_path / "hf"), (zyphra, released)):
        change_config(folder, max_sequence_length=length)
        with pytest.raises(InterchangeError, match=r"config\.json: max_sequence_length is .*, not a whole number"):
            form.read(folder)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.999])
def test_a_truncated_file_is_refused_by_name(released, silu, tmp_path, keep):
    path = released / "pytorch_model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(InterchangeError, match=r"pytorch_model\.bin"):
        zyphra.read(released)

    hf.write(canonical(silu), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(InterchangeError, match=r"model\.safetensors"):
        hf.read(tmp_path / "hf")


def test_missing_surplus_and_mistyped_tensors_are_named(released, silu):
    some = "decoder.layers.1.mixer.router.bias"
    without = {name: weight for name, weight in silu.weights.items() if name != some}
    cases = [
        ({"model": without}, f"has no {some}"),
        ({"model": {**silu.weights, "output_layer.weight": torch.zeros(2)}}, "output_layer.weight"),
        ({"model": {**silu.weights, some: torch.zeros(5)}}, f"{some} is 5; its config says 4"),
        ({"model": {**silu.weights, some: torch.zeros(4, dtype=torch.int64)}}, f"{some} is torch.int64"),
        ({"model": {**silu.weights, "note": "text"}}, "'note' is a str"),
        ({"weights": silu.weights}, "no state dict.*found \\['weights'\\]"),
        ([1, 2], "no state dict.*found list"),
    ]
    for content, message in cases:
        save(released, content)
        with pytest.raises(InterchangeError, match=message):
            zyphra.read(released)


def test_a_flipped_bit_in_a_weight_is_noticed(released):
    path = released / "pytorch_model.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(InterchangeError, match=r"pytorch_model\.bin: damaged: .*checksum"):
        zyphra.read(released)


@pytest.mark.parametrize("form", ["bare", "sharded", "safetensors", "float64"])
def test_released_weights_are_read_in_other_forms(released, silu, form):
    expected, path = zyphra.read(released), released / "pytorch_model.bin"
    path.unlink()
    names = sorted(silu.weights)
    if form == "bare":
        torch.save(silu.weights, path)
    elif form == "sharded":
        parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
        for file, part in parts.items():
            torch.save({name: silu.weights[name] for name in part}, released / file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (released / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif form == "safetensors":
        save_file(silu.weights, released / "model.safetensors")
    else:
        torch.save({"model": {name: weight.double() for name, weight in silu.weights.items()}}, path)
    assert_same(zyphra.read(released), expected)


def test_mapped_file_is_reopened_after_its_limit(released, monkeypatch):
    entries = torch_file.read(released / "pytorch_model.bin")
    opened, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **more: opened.append(path) or load(path, **more))
    monkeypatch.setattr(torch_file, "MAPPED_BYTES", sum(entry.bytes for entry in entries.values()) // 2)
    for entry in entries.values():
        entry.load()
    assert len(opened) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(silu, tmp_path, value):
    name = "decoder.layers.1.mixer.router.bias"
    weight = silu.weights[name].clone()
    weight[2] = value
    with pytest.raises(InterchangeError, match=f"{name} holds NaN or infinity \\(1 of 4 values\\)"):
        convert.to_hf(canonical(silu.with_weights(**{name: weight})), tmp_path / "out", check="none")
    assert not list(tmp_path.iterdir())


def test_a_name_on_the_hub_means_its_download(silu, tmp_path, monkeypatch):
    with pytest.raises(InterchangeError, match="run `hf download some/model` first"):
        open_model(Path("some/model"))
    snapshot = tmp_path / "hub/models--some--model/snapshots/0123456789012345678901234567890123456789"
    hf.write(canonical(silu), snapshot)
    (tmp_path / "hub/models--some--model/refs").mkdir()
    (tmp_path / "hub/models--some--model/refs/main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert open_model(Path("some/model")).source == str(snapshot)


def test_missing_or_outside_shard_is_named(silu, tmp_path):
    hf.write(canonical(silu), tmp_path, shard_bytes=50_000)
    index = tmp_path / hf.INDEX
    content = json.loads(index.read_text())
    second = sorted(tmp_path.glob("*.safetensors"))[1]
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(InterchangeError, match=f"{second.name}: no such file"):
        hf.read(tmp_path)
    content["weight_map"]["decoder.layers.0.mixer.D"] = "../secret.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(InterchangeError, match=r"index.json: weight_map names '\.\./secret"):
        hf.read(tmp_path)


def test_index_and_shards_that_disagree_are_named(silu, tmp_path):
    hf.write(canonical(silu), tmp_path, shard_bytes=50_000)
    index = tmp_path / hf.INDEX
    content = json.loads(index.read_text())
    (name, held), *_, (_, other) = sorted(content["weight_map"].items(), key=lambda each: each[1])
    assert held != other
    for file, reason in ((other, rf"{other}: has no {name}"), ("weights.npz", "weights must be in .safetensors")):
        index.write_text(json.dumps({"weight_map": content["weight_map"] | {name: file}}))
        with pytest.raises(InterchangeError, match=reason):
            hf.read(tmp_path)


def test_unreadable_configs_and_absent_weights_are_named(silu, tmp_path):
    hf.write(canonical(silu), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole = config.read_text()
    for content, reason in ((whole[:-9], "not readable JSON"), ("[1]", "holds a list, not an object")):
        config.write_text(content)
        with pytest.raises(InterchangeError, match=f"config.json: {reason}"):
            hf.read(tmp_path)
    config.write_text(whole)
    held = load_file(weights)
    save_file({name: each.to(torch.int8) for name, each in held.items()}, weights, {"format": "pt"})
    with pytest.raises(InterchangeError, match="is I8; weights are F32"):
        hf.read(tmp_path)
    weights.unlink()
    with pytest.raises(InterchangeError, match=r"model\.safetensors: no such file"):
        hf.read(tmp_path)


def test_another_model_s_config_is_refused(silu, tmp_path):
    hf.write(canonical(silu), tmp_path)
    for changes, field in [({"model_type": "mamba"}, "model_type"), ({"tie_word_embeddings": False}, "tie_word")]:
        kept = (tmp_path / "config.json").read_text()
        change_config(tmp_path, **changes)
        with pytest.raises(InterchangeError, match=field):
            hf.read(tmp_path)
        (tmp_path / "config.json").write_text(kept)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"layers": "ar"}, "the released format has no character for attention"),
        ({"layers": "rm"}, "the released format has no character for dense MLP"),
        ({"num_experts_per_tok": 2}, "model.top_k is 2"),
        ({"router_kind": "softmax", "router_scores": "softmax"}, "model.router.kind is softmax"),
        ({"shared_expert_hidden_size": 24}, "model.shared_expert_hidden_size is 24"),
        ({"mamba_norms": True}, "model.mamba_norms is true"),
        ({"logit_softcap": 30.0}, "model.logit_softcap is 30"),
        ({"residual_multiplier": 0.5}, "model.multipliers is not 1"),
    ],
)
def test_released_format_refuses_other_models(model, named, tmp_path):
    with pytest.raises(InterchangeError, match=named):
        zyphra.write(canonical(tiny(**{"layers": "r4"} | model)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_when_a_conversion_fails_midway(silu, tmp_path):
    def interrupted(_):
        raise KeyboardInterrupt

    for convert_to in (convert.to_hf, convert.to_zyphra):
        with pytest.raises(KeyboardInterrupt):
            convert_to(canonical(silu), tmp_path / "out", watch=interrupted)
    assert not list(tmp_path.iterdir())


def test_nonempty_folder_is_not_overwritten(silu, tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("A model of somebody else.")
    for overwrite in (False, True):
        with pytest.raises(InterchangeError, match=r"already there.* is empty$"):
            convert.to_hf(canonical(silu), tmp_path, check="none", overwrite=overwrite)
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("to", [convert.to_checkpoint, partial(convert.to_hf, check="none")], ids=["checkpoint", "hf"])
def test_a_conversion_can_be_repeated(silu, tmp_path, to):
    to(canonical(silu), tmp_path / "out")
    (tmp_path / "out/older").touch()
    with pytest.raises(InterchangeError, match=r"overwrite it \(--overwrite; in Python overwrite=True\)"):
        to(canonical(silu), tmp_path / "out")
    to(canonical(silu), tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (tmp_path / "out/older").exists()


def test_a_tokenizer_of_another_model_is_refused(silu, tokenizer_file, tmp_path):
    small = tiny("silu", vocab=32)
    with pytest.raises(InterchangeError, match=r"tokenizer\.json: has ids up to 61, but vocab_size of .* is 32"):
        convert.to_hf(canonical(small, tokenizer=tokenizer_file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_model_card_tells_the_facts(silu, tmp_path):
    hf.write(canonical(silu, past=lambda: Past({"Trained on": "12 tokens"})), tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "56,136, of which 28,488 active for each token" in card
    assert "Trained on | 12 tokens" in card and "SwiGLU" in card


def test_the_model_card_claims_nothing_else(tmp_path):
    hf.write(canonical(tiny(layers="am")), tmp_path / "transformer")
    card = (tmp_path / "transformer" / "README.md").read_text()
    for claim in ("- mamba\n", "mixture-of-experts", "convolution", "A_log", "the state", "balance"):
        assert claim not in card, claim
    assert "attention reads across documents" in card
    hf.write(
        cast(canonical(tiny(layers="s4", router_kind="softmax", router_scores="softmax")), torch.bfloat16),
        tmp_path / "hybrid",
    )
    card = (tmp_path / "hybrid" / "README.md").read_text()
    assert "bfloat16; A_log, D, dt_bias in float32" in card and "state 6, convolution 4" in card
    assert "does not balance the experts" in card and "balance_in_training" not in card


def test_only_rotary_positions_limit_the_length(silu, tokenizer_file, tmp_path):
    hf.write(canonical(silu, tokenizer=tokenizer_file), tmp_path / "recurrent")
    hf.write(canonical(tiny(layers="r4a4"), tokenizer=tokenizer_file), tmp_path / "attention")
    recurrent, attention = (
        json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("recurrent", "attention")
    )
    assert "model_max_length" not in recurrent and attention["model_max_length"] > 0


def test_snippet_of_the_card_adds_no_tokens(silu, tokenizer_file, tmp_path):
    content, eod = json.loads(tokenizer_file.read_text()), "<|endoftext|>"
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": eod, "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {eod: {"id": eod, "ids": [0], "tokens": [eod]}},
    }
    (tmp_path / "adds.json").write_text(json.dumps(content))
    for name, adds in ((tokenizer_file, False), (tmp_path / "adds.json", True)):
        hf.write(canonical(silu, tokenizer=name), tmp_path / "out")
        assert ("add_special_tokens=False" in (tmp_path / "out" / "README.md").read_text()) == adds


def test_tokenizer_with_another_end_of_document_is_refused(tokenizer_file, tmp_path):
    with pytest.raises(InterchangeError, match=r"ends documents with id 0, but the state .* restarts after id 5"):
        convert.to_hf(canonical(tiny("silu", eod_reset=5), tokenizer=tokenizer_file), tmp_path / "out")


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "adapter_config.json"])
def test_weights_that_transformers_reads_otherwise_are_refused(silu, tmp_path, file):
    hf.write(canonical(silu), tmp_path)
    (tmp_path / file).write_text('{"weight_map": {}}')
    with pytest.raises(InterchangeError, match="two sets of weights" if "index" in file else "holds an adapter"):
        hf.read(tmp_path)


def test_parameter_with_and_without_prefix_is_refused(silu, tmp_path):
    hf.write(canonical(silu), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "decoder.layers.2.mixer.D"
    save_file(tensors | {name: tensors[f"model.{name}"] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InterchangeError, match=rf"has both {name} and model\.{name}"):
        hf.read(tmp_path)


def test_run_named_without_its_folder_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/mine").mkdir(parents=True)
    with pytest.raises(InterchangeError, match=r"^mine: no such folder; did you mean runs/mine\?"):
        open_model(Path("mine"))


@pytest.mark.parametrize("made", ["", "runs/typos"])
def test_mistyped_run_is_not_sought_on_the_hub(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(made).mkdir(parents=True, exist_ok=True)
    with pytest.raises(InterchangeError, match="runs/typo: no such folder") as refused:
        open_model(Path("runs/typo"))
    assert "hf download" not in str(refused.value)
    assert ("did you mean runs/typos?" in str(refused.value)) == bool(made)


def test_released_format_refuses_before_it_warns(tmp_path):
    folder = tmp_path / "model"
    hf.write(canonical(tiny()), folder)
    content = json.loads((folder / "config.json").read_text()) | {"eod_reset": 3}
    (folder / "config.json").write_text(json.dumps(content))
    done = CliRunner().invoke(app, ["export", "zyphra", str(folder), str(tmp_path / "out")])
    assert isinstance(done.exception, InterchangeError) and "eod_reset" in str(done.exception)
    assert "warning" not in done.output


def test_export_given_as_a_checkpoint_is_recognised(released, silu, tmp_path):
    hf.write(canonical(silu), tmp_path / "hf")
    for folder, form in ((tmp_path / "hf", "hf"), (released, "zyphra")):
        with pytest.raises(DamagedCheckpoint, match=f"an export, .* `blackmamba import {form} {folder} checkpoints/"):
            find_checkpoint(folder)
