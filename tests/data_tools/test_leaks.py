"""Validation text that is in the training shards too: refused by every tool, and by training."""

import gzip
import lzma
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data import build
from megatron_blackmamba.data_tools.mixture import plan_mixture, verify_mixture
from megatron_blackmamba.data_tools.verification import verify
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from tests.data.corpus import data_config


@pytest.fixture
def mixture(run, write_jsonl, tmp_path):
    """A raw folder that holds val.jsonl, beside val.jsonl tokenized by itself: in another order."""
    write_jsonl("raw/a.jsonl", [f"a document of the corpus, number {i}" for i in range(40)])
    val = write_jsonl("raw/val.jsonl", [f"a document that is held out, number {i}" for i in range(20)])

    def make(**options):
        run(tmp_path / "raw", out="train", **options)
        run(val, out="held_out", seed=7)
        path = tmp_path / "mixture.yaml"
        path.write_text(yaml.safe_dump({"sources": [{"name": "a", "shards": "train", "validation": "held_out"}]}))
        return path

    return make


def test_a_leak_is_refused_by_name_everywhere(mixture, tmp_path):
    path = mixture()
    read = Mixture.read(path)
    leak = (
        f"source 'a': {tmp_path}/train/shard_00001 trains on val.jsonl, which {tmp_path}/held_out/shard_00001 "
        "of source 'a' holds out for validation"
    )
    for refuse in (
        lambda: verify_mixture(read, 16),
        lambda: plan_mixture(read, 1000, 16),
        lambda: build(data_config(path), vocab_size=600, total_samples=10),
    ):
        with pytest.raises(MixtureError) as error:
            refuse()
        assert str(error.value).startswith(leak) and "--exclude" in str(error.value)
    problems = [
        " ".join(verdict.problems) for verdict in verify([tmp_path / "train", tmp_path / "held_out"], quiet=True)
    ]
    assert problems[0] == "" and f"val.jsonl, which is in {tmp_path}/train/shard_00001 too" in problems[1]
    result = CliRunner().invoke(app, ["data", "verify", str(path)])
    assert result.exit_code == 2 and "would be seen twice" in result.output


@pytest.mark.parametrize(
    "trained, held_out", [("val.jsonl", "v.jsonl.gz"), ("val.jsonl.gz", "v.jsonl"), ("val.jsonl.gz", "v.jsonl.xz")]
)
def test_compression_does_not_hide_a_leak(run, write_jsonl, tmp_path, trained, held_out):
    content = write_jsonl("texts", [f"a document that is held out, number {i}" for i in range(20)]).read_bytes()
    packed = {".jsonl": content, ".gz": gzip.compress(content), ".xz": lzma.compress(content)}
    for name, out in ((trained, "train"), (held_out, "held_out")):
        (tmp_path / name).write_bytes(packed[Path(name).suffix])
        run(tmp_path / name, out=out, seed=len(out))
    path = tmp_path / "mixture.yaml"
    path.write_text("sources: [{name: a, shards: train, validation: held_out}]")
    with pytest.raises(MixtureError, match=r"trains on val\.jsonl.*, which .*held_out/shard"):
        verify_mixture(Mixture.read(path), 16)
    problems = [verdict.problems for verdict in verify([tmp_path / "train", tmp_path / "held_out"], quiet=True)]
    assert not problems[0] and "it would be seen twice" in problems[1][0]


def test_a_compressed_file_is_reported_once(run, write_jsonl, tmp_path):
    other = write_jsonl("other.jsonl", ["other words"])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "some words"}\n'))
    run(tmp_path / "a.jsonl.gz", out="one")
    run(tmp_path / "a.jsonl.gz", other, out="two")
    _, verdict = verify([tmp_path / "one", tmp_path / "two"], quiet=True)
    assert [problem.split(", which")[0] for problem in verdict.problems] == ["was made from a.jsonl.gz"]


@pytest.mark.parametrize("options", [{"exclude": ("val.*",)}, {"split": "train"}])
def test_without_the_held_out_file_it_trains(mixture, options):
    path = mixture(**options)
    assert verify_mixture(Mixture.read(path), 16)
    assert build(data_config(path), vocab_size=600, total_samples=10).validation
