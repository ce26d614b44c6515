"""Multi-token prediction of Nemotron-H files: read, trained on, and written back."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.config import ParallelConfig
from megatron_blackmamba.inference.generator import load as load_generator
from megatron_blackmamba.interchange import convert, megatron, native, open
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.model import build
from megatron_blackmamba.runtime import world
from tests.interchange.native_grid import ODD, SIZES, described, tensors, write_extra_depth, write_model

KEYS = {**SIZES, **ODD["nemotron_h"]}
DECLARED = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return write_extra_depth(tmp_path_factory.mktemp("extra_depth") / "model", **KEYS)


def test_extra_depth_is_written_back_bit_exactly(theirs, tmp_path):
    model = native.read(theirs)
    assert (model.config.mtp.pattern, model.config.mtp.reads, model.unread) == ("*E", "norm", ())
    convert.to_checkpoint(model, tmp_path / "checkpoint", original=theirs)
    arguments = ["export", "hf", str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--native", "--nproc", "2"]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert "leaves out" not in told.output
    before, after = tensors(theirs), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and sum(name.startswith("mtp.") for name in after) == 26
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config[name] for name in DECLARED} == DECLARED


@torch.no_grad()
def test_extra_depth_computes_as_transformers_layers_do(theirs):
    """Its layers, between what the file's names say, are those of a model of two layers."""
    ids = torch.randint(60, (2, 18), generator=torch.Generator().manual_seed(1))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    held = load_file(theirs / "depth.safetensors")
    main, depth = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (theirs, theirs.with_name("model_depth"))
    )
    depth.model.norm_f.weight.copy_(held["mtp.layers.1.final_layernorm.weight"])

    def normed(x, name):
        return torch.nn.functional.rms_norm(x, (24,), held[f"mtp.layers.0.{name}.weight"], 1e-5)

    hidden = normed(main.model(tokens, use_cache=False).last_hidden_state, "hnorm")
    both = torch.cat([normed(main.model.embeddings(labels), "enorm"), hidden], -1)
    behind = depth.model(inputs_embeds=both @ held["mtp.layers.0.eh_proj.weight"].T, use_cache=False).last_hidden_state
    logits = main.lm_head(behind)[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    model = native.read(theirs)
    with world.fake(ParallelConfig(), world_size=1, where="cpu") as alone:
        ours = build(megatron.run_config(model), alone).eval()
        open.copy_into(ours, megatron.stacked(model), theirs)
        ours.training = ours.decoder.training = True  # its routers choose as in inference
        ours(tokens, labels)
    torch.testing.assert_close(ours.mtp_losses_BS[:, :-1], expected, atol=1e-5, rtol=0)


def test_imported_depth_drafts_the_same_text(theirs):
    plain, drafting = (load_generator(theirs, dtype=torch.float32, draft=draft) for draft in (False, True))
    rows = [list(each.tokens([[3, 9, 5]], max_new_tokens=20)) for each in (plain, drafting)]
    assert rows[0] == rows[1]


def test_declared_depth_without_weights_is_none(theirs, tmp_path):
    folder = described(write_model("nemotron_h", tmp_path / "model", **KEYS), **DECLARED)
    assert native.read(folder).config.mtp.pattern is None


def test_weights_under_the_models_prefix_are_read(theirs, tmp_path):
    folder = shutil.copytree(theirs, tmp_path / "model")
    held = {f"model.{name}": value for name, value in load_file(folder / "depth.safetensors").items()}
    save_file(held, folder / "depth.safetensors", {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    kept = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    index["weight_map"] = kept | dict.fromkeys(held, "depth.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    mine, its = native.read(folder).entries, native.read(theirs).entries
    assert mine.keys() == its.keys() and all(torch.equal(its[name].load(), mine[name].load()) for name in its)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; import reads one depth. Set"),
        ({"mtp_layers_block_type": ["mlp", "moe"]}, "mtp_layers_block_type and mtp_hybrid_override_pattern differ"),
        ({"mtp_hybrid_override_pattern": "*X"}, "mtp_hybrid_override_pattern has 'X'; a layer is one of"),
        ({"mtp_hybrid_override_pattern": 3}, "mtp_hybrid_override_pattern has 3; a layer is one of"),
        (
            {"mtp_hybrid_override_pattern": "*EM"},
            r"has no mtp\.layers\.2\.final_layernorm\.weight, which its config requires",
        ),
        ({"mtp_hybrid_override_pattern": "E"}, r"has no mtp\.layers\.0\.final_layernorm\.weight"),
        (
            {"hybrid_override_pattern": "M*-*", "layers_block_type": None, "num_hidden_layers": 4},
            "the multi-token prediction has a layer 'E', which the model itself has not. Set num_nextn_predict_layers",
        ),
    ],
)
def test_other_forms_of_extra_depths_are_refused(keys, told, theirs, tmp_path):
    folder = shutil.copytree(theirs, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(InterchangeError, match=told):
        native.read(folder)


def test_exports_drop_depths_that_have_no_place(theirs, tmp_path):
    model = native.read(theirs)
    other = model.config.model_copy(update={"mtp": model.config.mtp.model_copy(update={"reads": "stream"})})
    assert native.held(model) is model
    changed = type(model)(other, model.entries, "ours")
    assert native.held(changed).config.mtp.pattern is None
    assert native.described(other).endswith("without its extra depth (model.mtp.reads=stream: set norm)")
    convert.to_hf(model, tmp_path / "ours", check="none")  # with our code, which has none
    assert open.open_export(tmp_path / "ours").config.mtp.pattern is None
