import json

import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data import build
from megatron_blackmamba.data_tools.mixture import (
    find_mixture,
    parse_count,
    plan_mixture,
    read_mixtures,
    verify_mixture,
)
from megatron_blackmamba.formats.mixture import Mixture, MixtureError
from tests.data.corpus import VOCAB, data_config, three_sources, write_mixture, write_shard

# The paper's table, with epochs for 300 billion tokens.
PAPER = {
    "pile": (0.324588, 0.32459),
    "slimpajama": (0.389505, 0.19475),
    "starcoder": (0.101434, 0.12172),
    "pes2o": (0.135245, 0.81147),
    "proofpile": (0.043278, 0.32459),
    "pg19": (0.005951, 0.81147),
}


def run(*arguments):
    return CliRunner().invoke(app, ["data", "mixture", *map(str, arguments)])


def test_the_command_reproduces_the_papers_table():
    result = run("paper_mix", "--tokens", "300e9", "--json")
    plan = json.loads(result.output)
    assert result.exit_code == 0
    assert plan["weighted_tokens"] == 1848.5e9
    assert plan["samples"] == 146_484_375 == sum(source["samples"] for source in plan["sources"])
    table = {s["name"]: (round(s["probability"], 6), round(s["epochs"], 5)) for s in plan["sources"]}
    assert table == PAPER


def test_the_table_fits_a_terminal_of_80_columns():
    lines = run("paper_mix", "--tokens", "300B").output.splitlines()
    table = lines[: 1 + next(i for i, line in enumerate(lines) if line.startswith(" all"))]
    assert max(len(line) for line in table) <= 80
    assert not any("…" in line for line in table)


def test_shards_that_are_there_decide_the_epochs(tmp_path):
    plan = plan_mixture(Mixture.read(three_sources(tmp_path)), 3200, 16)
    source = plan.sources[2]
    assert (source.shards, source.shard_tokens, source.tokens) == (1, 90, 90)
    assert source.epochs == source.samples * 16 / 90
    assert not plan.missing


def test_its_samples_are_those_that_training_reads(tmp_path):
    for number, name in enumerate("abcde"):
        write_shard(tmp_path / f"{name}/one", 10_000 * number, 500)
    path = write_mixture(tmp_path, [{"name": name, "shards": name} for name in "abcde"])
    for samples in range(1, 20):
        planned = plan_mixture(Mixture.read(path), 16 * samples, 16)
        trained = build(data_config(path), vocab_size=VOCAB, total_samples=samples).describe()["planned"]["sources"]
        assert {s.name: s.samples for s in planned.sources} == {name: s["samples"] for name, s in trained.items()}


def test_table_marks_stated_tokens_that_differ_from_measured(tmp_path):
    path = three_sources(tmp_path)
    path.write_text(path.read_text().replace("name: b", "name: b\n  tokens: 1000"))
    output = run(path, "--tokens", "1e5").output
    assert "b: the file states 1,000 tokens, its 1 shards hold 700: epochs are of those" in output
    assert "a: the file" not in output


def test_source_without_shards_or_tokens_cannot_be_planned(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("sources: [{name: a, shards: nowhere}]")
    with pytest.raises(MixtureError, match="without shards, state the source's `tokens`"):
        plan_mixture(Mixture.read(path))


def test_exceeding_max_epochs_prints_the_table_and_fails(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("sources: [{name: a, tokens: 1e6, max_epochs: 2}, {name: b, tokens: 1e6}]")
    assert run(path, "--tokens", "3.9e6").exit_code == 0
    result = run(path, "--tokens", "4.1e6")
    assert "2.05005" in result.output
    assert isinstance(result.exception, MixtureError)
    assert "source 'a': 2.05" in str(result.exception)


def test_reading_a_source_twice_is_warned_of(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("sources: [{name: a, tokens: 1e6, max_epochs: 2}, {name: b, tokens: 1e6}]")
    assert "Warning" not in run(path, "--tokens", "1.9e6").output
    assert "Warning: the run reads sources more than once: b 1.95 times." in run(path, "--tokens", "3.9e6").output


def test_a_phase_shows_its_own_probabilities(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(
        "sources: [{name: a, tokens: 1e6}, {name: b, tokens: 1e6}]\nphases: [{from_sample: 100, weights: {a: 3}}]"
    )
    assert "from sample 100: a 0.750000, b 0.250000" in run(path, "--tokens", "1e6").output


def test_verify_finds_a_copy_and_another_tokenizer(tmp_path):
    mixture = Mixture.read(three_sources(tmp_path))
    findings = verify_mixture(mixture, 16)
    assert "5 shards of one tokenizer" in findings[0]
    write_shard(tmp_path / "c/copy", 20_000, 90)
    with pytest.raises(MixtureError, match="the same tokens"):
        verify_mixture(mixture, 16)
    write_shard(tmp_path / "c/copy", 30_000, 90, tokenizer="b" * 64)
    with pytest.raises(MixtureError, match="another tokenizer"):
        verify_mixture(mixture, 16)


def test_data_verify_takes_a_mixture_file(tmp_path):
    path = three_sources(tmp_path)
    result = CliRunner().invoke(app, ["data", "verify", str(path), "--quick"])
    assert "5 shards, 2,393 tokens: all sound" in result.output
    assert f"{path}: 5 shards of one tokenizer" in result.output
    (tmp_path / "b/one.bin").write_bytes(b"")
    assert CliRunner().invoke(app, ["data", "verify", str(path), "--quick"]).exit_code == 2


def test_verify_tells_when_stated_and_measured_tokens_differ(tmp_path):
    path = three_sources(tmp_path)
    path.write_text(path.read_text().replace("name: b", "name: b\n  tokens: 1000"))
    assert "source 'b': the file states 1,000 tokens, the shards hold 700" in verify_mixture(Mixture.read(path), 16)


@pytest.mark.parametrize("text, count", [("300e9", 300e9), ("300B", 300e9), ("1.5t", 1.5e12), ("2_000k", 2e6)])
def test_counts_are_read_as_people_write_them(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "-5", "0", "B", "1e400", "nan"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(MixtureError, match="write 300e9"):
        parse_count(text)


def test_source_below_one_sample_is_refused(tmp_path):
    path = three_sources(tmp_path)
    with pytest.raises(MixtureError, match="less than one sample of 2048"):
        plan_mixture(Mixture.read(path), 10_000, 2048).check()
    plan_mixture(Mixture.read(path), 1_000, 16).check()


@pytest.mark.parametrize("name, message", [("nosuch", "shipped ones are .*paper_mix"), (".", "is a folder")])
def test_missing_mixture_lists_the_existing_ones(name, message):
    with pytest.raises(MixtureError, match=message):
        find_mixture(name)


def test_a_mixture_file_may_have_any_name(tmp_path):
    path = three_sources(tmp_path)
    other = path.rename(path.with_suffix(".cfg"))
    assert list(read_mixtures([str(other), str(tmp_path / "a/one"), str(tmp_path / "a/one.bin")])) == [str(other)]


@pytest.mark.parametrize("sizes", [[1000], [1000, 503, 777], [90, 90, 4000, 333]])
def test_all_tokens_once_are_within_one_epoch(tmp_path, sizes):
    for number, size in enumerate(sizes):
        write_shard(tmp_path / f"{number}/one", 10_000 * number, size)
    sources = [{"name": f"s{n}", "shards": str(n), "max_epochs": 1} for n in range(len(sizes))]
    planned = plan_mixture(Mixture.read(write_mixture(tmp_path, sources)), None, 16)
    planned.check()
    assert planned.tokens == planned.samples * 16 > 0.8 * sum(sizes)
    twice = write_mixture(tmp_path, [{**sources[0], "weight": 9}, {"name": "more", "shards": "more"}])
    write_shard(tmp_path / "more/one", 900_000, sizes[0])
    with pytest.raises(MixtureError, match=r"s0.*max_epochs is 1"):
        plan_mixture(Mixture.read(twice), None, 16).check()
