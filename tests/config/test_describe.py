import re
from pathlib import Path

import pytest

from megatron_blackmamba import layers, norms, optimizers, routers
from megatron_blackmamba.config import ConfigError, keys, load, shipped
from megatron_blackmamba.config.describe import every_key, new_run, write_new

KINDS = {
    "name": "text",
    "model": "section",
    "model.activation": "silu, gelu, relu2",
    "model.conv_kernel": "integer, ≥ 2, ≤ 8",
    "model.experts": "integer, ≥ 1, ≤ 2^16",
    "model.vocab_size": "integer, > 0, ≤ 2^31",
    "model.tie_embeddings": "true or false",
    "model.eod_reset": "integer or null, ≥ 0",
    "data.mixture": "text or null",
    "optimizer.warmup_fraction": "number, ≥ 0, < 1",
    "training.profile": "two numbers or null",
    "resume.allow": "list",
}


def test_every_key_has_a_description():
    described = {key.path: key.description for key in every_key()}
    assert set(keys()) <= set(described)
    assert [path for path, text in described.items() if not text] == []


@pytest.mark.parametrize(
    ("key", "kinds"),
    [
        ("model.router.kind", [f"{kind.name}:" for kind in routers.all_kinds()]),
        ("model.final_norm", [f"{kind.name}:" for kind in norms.all_kinds()]),
        ("optimizer.kind", [f"{kind.name}:" for kind in optimizers.all_kinds()]),
        ("model.pattern", [f"{kind.letter} {kind.name}" for kind in layers.all_kinds()]),
    ],
)
def test_descriptions_name_every_kind(key, kinds):
    described = {key.path: key.description for key in every_key()}
    assert [kind for kind in kinds if kind not in described[key]] == []


def test_every_key_tells_what_it_takes():
    kinds = {key.path: key.kind for key in every_key()}
    assert {path: kinds[path] for path in KINDS} == KINDS


@pytest.mark.parametrize("name", shipped())
def test_new_file_describes_run_it_is_made_from(name, tmp_path):
    file = tmp_path / "mine.yaml"
    write_new("mine", name, ["training.seed=7"], file)
    assert load(file) == load(name, ["name=mine", "training.seed=7"])
    everything = tmp_path / "everything.yaml"
    everything.write_text(file.read_text().replace("#: ", ""))
    assert load(everything) == load(file)


def test_changed_keys_are_not_comments(tmp_path):
    text = new_run("mine", "quickstart", ["training.steps=5", "model.router.kind=softmax"], tmp_path / "mine.yaml")
    assert re.search(r"^  steps: 5$", text, re.MULTILINE) and not re.search(r"^  tokens:", text, re.MULTILINE)
    assert re.search(r"^  router:$", text, re.MULTILINE) and re.search(r"^    kind: softmax$", text, re.MULTILINE)
    assert re.search(r"^    #: iterations: 1$", text, re.MULTILINE)


def test_existing_file_is_not_replaced(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: precious\n")
    with pytest.raises(ConfigError, match=r"exists\. Choose another name"):
        write_new("mine", "tiny", [], file)
    assert file.read_text() == "name: precious\n"


def test_mixture_beside_the_new_file_stays_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mix.yaml").write_text("sources: []")
    write_new("my run", "tiny", ["data.mixture=mix.yaml"], Path("my run.yaml"))
    text = Path("my run.yaml").read_text()
    assert "mixture: mix.yaml" in text and "blackmamba train 'my run.yaml'" in text
    assert load("my run.yaml").data.mixture == str(tmp_path / "mix.yaml")
