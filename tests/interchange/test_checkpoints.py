"""Our own checkpoints: any layout starts from an imported one, and one that any layout wrote is exported."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_blackmamba.checkpoint import DamagedCheckpoint, manifest
from megatron_blackmamba.checkpoint.reading import STATE
from megatron_blackmamba.formats.evaluations import Evaluation, ScoringKey, TaskResult
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange import convert, hf, megatron, parity, zyphra
from megatron_blackmamba.interchange.canonical import cast, tokenizer_of
from megatron_blackmamba.interchange.model_card import model_card
from megatron_blackmamba.interchange.open import open_model
from megatron_blackmamba.interchange.verification import verify
from tests.checkpoint.files import replace_file
from tests.interchange.layouts_probe import LAYOUTS, TOKENS
from tests.reference import forward, tiny
from tests.reference.canonical import canonical
from tests.runtime.ranks import fork_script

pytestmark = pytest.mark.xdist_group("layouts")


def assert_same(one, other):
    assert one.entries.keys() == other.entries.keys()
    for name, tensor in one.tensors():
        loaded = other.entries[name].load()
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), name


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The folder in which every layout left its answers and its own checkpoint."""
    folder = tmp_path_factory.mktemp("layouts")
    for activation in ("silu", "gelu"):
        megatron.write(canonical(tiny(activation)), folder / activation)
    assert fork_script("tests.interchange.layouts_probe", str(folder)) == {}
    return folder


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("layout", [name for name, parallel in LAYOUTS.items() if "pipeline" not in parallel])
def test_every_layout_started_from_import_agrees_with_reference(started, activation, layout):
    logits_BSV = torch.load(started / f"{activation}_{layout}.pt")
    model = tiny(activation)
    for row, tokens in enumerate(TOKENS):
        expected = torch.from_numpy(forward(model.weights, model.config, tokens).logits_SV)
        torch.testing.assert_close(logits_BSV[row].double(), expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_equal_whatever_layout_saved_them(started, layout):
    saved = started / f"{layout}_saved"
    for name in (STATE, "config.yaml"):
        (saved / name).write_text((started / "silu" / name).read_text())
    files = {path.name: manifest.describe(path) for path in saved.iterdir()}
    manifest.write(saved, 0, files, {})
    assert_same(megatron.read(saved, verify=True), canonical(tiny("silu")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_reads_what_any_layout_saved(started, layout, tmp_path):
    """torch's own reader puts the shards of all ranks together, without this project."""
    found = {}
    for name in ("silu", f"{layout}_saved"):
        dcp_to_torch_save(started / name, tmp_path / name)
        found[name] = torch.load(tmp_path / name, weights_only=True)
    imported, saved = found.values()
    weights = {name for name in imported if not name.startswith("optimizer.")}
    assert len(weights) > 20 and weights <= saved.keys()
    assert all(torch.equal(imported[name], saved[name]) for name in weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_export_what_they_hold(started, layout):
    exported = started / f"{layout}_exported"
    assert_same(hf.read(exported), canonical(tiny("silu")))
    assert len(list(exported.glob("*.safetensors"))) == (1 if layout == "solo" else 2)


def test_ranks_agree_on_a_failed_export(started):
    first, second = (json.loads((started / f"failures_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    (made, *disk), (full, *left), (bad, *then), (again, *last) = first
    assert made is again is None and disk == left == then == last == [["step_1"]]
    assert full.startswith("write: rank 1: File too large: ") and full.endswith(".safetensors")
    assert "write: rank 1: the model in training: decoder.layers.1.mixer.local_experts" in bad and "holds NaN" in bad
    assert_same(hf.read(started / "live" / "step_1"), canonical(tiny("silu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_round_gives_back_the_same_bits(silu, tokenizer_file, tmp_path, dtype):
    model = cast(canonical(silu, tokenizer=tokenizer_file), dtype)
    megatron.write(model, tmp_path / "ours")
    hf.write(megatron.read(tmp_path / "ours"), tmp_path / "hf")
    megatron.write(hf.read(tmp_path / "hf"), tmp_path / "back")
    zyphra.write(megatron.read(tmp_path / "back"), tmp_path / "released")
    megatron.write(zyphra.read(tmp_path / "released"), tmp_path / "ours_again")
    again = megatron.read(tmp_path / "ours_again", verify=True)
    assert_same(again, model)
    assert megatron.read(tmp_path / "back").tokenizer.read_bytes() == tokenizer_file.read_bytes()


def test_checkpoints_and_exports_keep_the_eod(silu, tokenizer_file, tmp_path):
    """The file alone would give <|endoftext|>, id 0."""
    megatron.write(canonical(silu, tokenizer=tokenizer_file, eod_id=3), tmp_path / "ours")
    hf.write(megatron.read(tmp_path / "ours"), tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 3
    megatron.write(hf.read(tmp_path / "hf"), tmp_path / "back")
    assert tokenizer_of(megatron.read(tmp_path / "back")).eod_id == 3


def test_checkpoint_does_not_contain_its_path(silu, tmp_path):
    megatron.write(canonical(silu), tmp_path / "somewhere")
    assert b"somewhere" not in (tmp_path / "somewhere/.metadata").read_bytes()


def test_bf16_checkpoint_keeps_the_recurrence_in_fp32(silu, tmp_path):
    rounded = tiny("silu").with_weights(**{name: w.bfloat16() for name, w in silu.weights.items()})
    convert.to_checkpoint(canonical(rounded), tmp_path / "out", verify=False)
    entries = megatron.read(tmp_path / "out").entries
    assert entries["decoder.layers.0.mixer.A_log"].dtype == torch.float32
    assert entries["decoder.layers.0.mixer.out_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_copied_exactly(silu, half, tmp_path):
    name = "embedding.word_embeddings.weight"
    mixed = canonical(silu.with_weights(**{name: silu.weights[name].to(half)}))
    convert.to_hf(mixed, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "float32"
    convert.to_checkpoint(mixed, tmp_path / "ours")
    convert.to_zyphra(mixed, tmp_path / "released")
    verify(tmp_path / "hf", against=tmp_path / "ours", check="none")
    for read, out in ((hf.read, "hf"), (megatron.read, "ours"), (zyphra.read, "released")):
        for each, tensor in read(tmp_path / out).tensors():
            assert torch.equal(tensor.float(), mixed.entries[each].load().float()), (out, each)


def test_checkpoint_conversions_end_with_a_comparison(silu, tokenizer_file, tmp_path):
    made = convert.to_checkpoint(canonical(silu, tokenizer=tokenizer_file), tmp_path / "ours")
    released = convert.to_zyphra(megatron.read(tmp_path / "ours"), tmp_path / "released")
    assert made.agrees and released.agrees
    assert made.tokens == 3 * 64 and released.decisions == 2 * made.tokens


def test_checkpoint_with_other_weights_is_refused(silu, tmp_path, monkeypatch):
    cut = megatron._cut
    monkeypatch.setattr(megatron, "_cut", lambda whole, *what: cut(lambda name: whole(name).flip(1), *what))
    with pytest.raises(parity.ParityError, match=r"local_experts\.0\.linear_fc1\.weight"):
        convert.to_checkpoint(canonical(silu), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_model_card_states_the_run(silu, tmp_path):
    megatron.write(canonical(silu), tmp_path / "ours")
    state = json.loads((tmp_path / "ours" / STATE).read_text())
    state |= {"progress": {"consumed_samples": 1000}, "data": {"sources": [{"name": "books"}, {"name": "web"}]}}
    state["config"]["start"] = {"from": "runs/earlier"}
    replace_file(tmp_path / "ours", STATE, json.dumps(state).encode())
    facts = megatron.read(tmp_path / "ours").past().facts
    assert facts["Trained on"].startswith("2,048,000 tokens") and facts["Sources"] == "books, web"
    assert facts["Started from"] == "the weights of earlier"


def test_opening_a_run_reads_no_history(silu, tmp_path, monkeypatch):
    folder = tmp_path / "run" / "checkpoints" / "step_00000000"
    megatron.write(canonical(silu), folder)

    def too_long(path):
        raise TimeoutError(path)

    monkeypatch.setattr(megatron, "metrics_so_far", too_long)
    opened = megatron.read(folder)
    with pytest.raises(TimeoutError, match=r"metrics\.jsonl"):
        opened.past()


def test_losses_and_scores_reach_the_model_card(silu, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step_00000000"
    megatron.write(canonical(silu), folder)
    lines = [{"step": 0, "loss": 4.25, "validation/loss": 4.5, "validation/loss/web": 4.5}, {"step": 1, "loss": 1.0}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    key = ScoringKey("hash", "piqa", "1", "data", "1", "float32", "separate", None, 2048)
    result = TaskResult(key, {"acc": 0.625}, {"acc": 0.0125}, 100, {}, 1.0)
    Evaluation("run", 0, (result,)).write(RunFolder(tmp_path / "run").evaluation(0))
    card = model_card(replace(megatron.read(folder), license="apache-2.0"))
    fields = yaml.safe_load(card.split("---")[1])
    assert fields["license"] == "apache-2.0"
    assert fields["model-index"][0]["results"][0]["metrics"] == [{"type": "acc", "value": 0.625}]
    read = ModelCard(card).data  # as huggingface_hub reads it
    (score,) = read.eval_results
    assert (read.license, score.dataset_type, score.metric_type, score.metric_value) == (
        "apache-2.0",
        "piqa",
        "acc",
        0.625,
    )
    assert "| Training loss | 4.2500 at step 0 |" in card
    assert "| Validation loss | 4.5000 at step 0 (web 4.5000) |" in card
    assert "| piqa | acc | 0.6250 | 0.0125 | 100 |" in card


def test_damage_is_looked_for_on_request(tmp_path):
    folder = tmp_path / "ours"
    megatron.write(canonical(tiny()), folder)
    largest = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    assert open_model(folder).entries  # reading a large checkpoint twice would take minutes
    with pytest.raises(DamagedCheckpoint, match=largest.name):
        open_model(folder, verify=True)
