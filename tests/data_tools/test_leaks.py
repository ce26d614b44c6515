"""Validation text that is in the training shards too: refused by every tool, and by training."""

import gzip
import json
import lzma
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data import build
from megatron_blackmamba.data_tools import overlaps
from megatron_blackmamba.data_tools.mixture import plan_mixture, verify_mixture
from megatron_blackmamba.data_tools.verification import adopt, verify
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from megatron_blackmamba.tokenizer import load_tokenizer
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


DOCUMENTS = [f"a document that is held out, number {i}" for i in range(20)]


@pytest.fixture
def converted(run, write_jsonl, tmp_path):
    """Return a function that writes a mixture whose validation documents are in training, once as Parquet."""

    def make(leaked=20, **keys):
        held_out = write_jsonl("v.jsonl", ["another one", *DOCUMENTS])
        others = [f"a document of the corpus, number {i}" for i in range(40)]
        pq.write_table(pa.table({"body": [*others, *DOCUMENTS[:leaked]]}), tmp_path / "web.parquet")
        run(held_out, out="held_out", seed=7)
        run(tmp_path / "web.parquet", out="train", fields=("body",))
        path = tmp_path / "mixture.yaml"
        source = {"name": "a", "shards": "train", "validation": "held_out"}
        path.write_text(yaml.safe_dump({"sources": [source], **keys}))
        return path

    return make


def without_samples(folder):
    """Turn the manifests in a folder into those of an older version."""
    for path in folder.glob("*.manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest.pop("sample")
        path.write_text(json.dumps(manifest))


def test_another_format_does_not_hide_a_leak(converted, tmp_path):
    path = converted()
    read = Mixture.read(path)
    for refuse in (
        lambda: verify_mixture(read, 16),
        lambda: plan_mixture(read, 1000, 16),
        lambda: build(data_config(path), vocab_size=600, total_samples=10),
    ):
        with pytest.raises(MixtureError, match=r"20 of the 21 validation documents .*\(95\.2%\)") as error:
            refuse()
        record = int(re.search(r"v\.jsonl, record (\d+) in ", str(error.value))[1])
        assert f"which is web.parquet, record {record + 39} in {tmp_path}/train/shard_00001:" in str(error.value)
    result = CliRunner().invoke(app, ["data", "verify", str(path)])
    assert isinstance(result.exception, MixtureError) and "max_overlap" in str(result.exception)


def test_a_few_documents_may_be_in_training_too(converted):
    path = converted(leaked=2)
    assert build(data_config(path), vocab_size=600, total_samples=10).validation
    findings = verify_mixture(Mixture.read(path), 16, cores=1)
    assert any("2 of its 21 validation documents (9.52%)" in finding for finding in findings)


def test_max_overlap_allows_a_leak_knowingly(converted):
    path = converted(max_overlap=1)
    assert build(data_config(path), vocab_size=600, total_samples=10).validation
    with pytest.raises(MixtureError, match="20 of the 21"):
        verify_mixture(Mixture.read(converted(leaked=20, max_overlap=0.9)), 16)


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_verify_finds_leaks_of_older_and_adopted_shards(converted, tmp_path, tokenizer_file, monkeypatch, block):
    monkeypatch.setattr(overlaps, "_BLOCK_TOKENS", block)
    path = converted()
    without_samples(tmp_path / "train")
    assert plan_mixture(Mixture.read(path), 1000, 16)  # it reads no tokens
    with pytest.raises(MixtureError, match=r"20 of its 21 validation documents .* v\.jsonl, record \d+ of .*held_out"):
        verify_mixture(Mixture.read(path), 16, cores=1)
    prefix = tmp_path / "train/shard_00001"
    Path(f"{prefix}.manifest.json").unlink()
    adopt(prefix, load_tokenizer(tokenizer_file))
    with pytest.raises(MixtureError, match=r"20 of the 21 .* shard_00001\.bin, record \d+ in "):
        plan_mixture(Mixture.read(path), 1000, 16)
