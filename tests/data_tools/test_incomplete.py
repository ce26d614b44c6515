"""Folders that lack shards: every tool refuses them and names the missing parts."""

import pytest
import yaml
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data import build
from megatron_blackmamba.data_tools.mixture import plan_mixture, verify_mixture
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from megatron_blackmamba.formats.shards import ShardError, ShardManifest
from tests.data.corpus import data_config


@pytest.fixture
def part(run, write_jsonl, tmp_path):
    """Make one part of four: each of four files becomes a shard of its own."""
    for name in "abcd":
        write_jsonl(f"raw/{name}.jsonl", [f"document {i} of file {name}" for i in range(20)])
    return lambda index: run(tmp_path / "raw", shard_size="1", array=f"{index}/4", out="tokens")


@pytest.fixture
def mixture(tmp_path):
    def mixture(shards="tokens"):
        path = tmp_path / "mixture.yaml"
        path.write_text(yaml.safe_dump({"sources": [{"name": "a", "shards": shards, "tokens": 1000}]}))
        return path

    return mixture


def uses(path):
    """All that can be done with a mixture."""
    yield lambda: verify_mixture(Mixture.read(path), 16)
    yield lambda: plan_mixture(Mixture.read(path), 1000, 16)
    yield lambda: build(data_config(path), vocab_size=600, total_samples=10)


def test_a_missing_last_part_is_refused_by_name(part, mixture, tmp_path):
    for index in (0, 1, 2):
        part(index)
    for use in uses(mixture()):
        with pytest.raises(MixtureError, match=r"tokens is incomplete: it lacks shard_00004 of 4 shards"):
            use()
    result = CliRunner().invoke(app, ["data", "verify", str(tmp_path / "tokens")])
    assert result.exit_code == 2 and "lacks shard_00004 of 4 shards" in result.output
    for use in uses(mixture("tokens/shard_*")):  # explicitly a part
        use()
    part(3)
    for use in uses(mixture()):
        use()


def test_added_inputs_raise_the_number_of_all_shards(part, run, write_jsonl, mixture, tmp_path):
    for index in range(4):
        part(index)
    write_jsonl("raw/e.jsonl", ["a file that came later"])
    done = run(tmp_path / "raw", shard_size="1", out="tokens")
    assert [made.written for made in done.shards] == [False] * 4 + [True]
    assert {made.manifest.shards for made in done.shards} == {5}
    for path in (tmp_path / "tokens").glob("shard_00005*"):
        path.unlink()
    for use in uses(mixture()):
        with pytest.raises(MixtureError, match="lacks shard_00005 of 5"):
            use()


def test_reads_older_manifests_and_refuses_newer_ones(part, tmp_path):
    part(0)
    path = tmp_path / "tokens/shard_00001.manifest.json"
    text = path.read_text()
    path.write_text("".join(line for line in text.splitlines(True) if '"shards":' not in line))
    assert ShardManifest.read(path).shards == 0
    path.write_text(text.replace('"format_version": 1', '"format_version": 2, "news": 1'))
    with pytest.raises(ShardError, match="manifest format 2, this version reads 1"):
        ShardManifest.read(path)
