import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from megatron_blackmamba.data_tools.commands import app
from megatron_blackmamba.data_tools.progress import short
from megatron_blackmamba.formats.shards import ShardManifest


@pytest.fixture
def call():
    """`blackmamba data ...`: exit code and what it printed."""

    def call(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)))

    return call


@pytest.fixture
def corpus(write_jsonl, tmp_path):
    write_jsonl("raw/a.jsonl", [f"the text of document {i}" for i in range(30)])
    write_jsonl("raw/b.jsonl", ["another file"])
    (tmp_path / "raw/README.md").write_text("read me")
    return tmp_path / "raw"


def test_tokenize_inspect_and_verify_tell_the_whole_story(call, corpus, tmp_path, tokenizer_file):
    out = tmp_path / "out"
    done = call("tokenize", corpus, out, "--tokenizer", tokenizer_file, "--shard-size", "1")
    assert done.exit_code == 0, done.output
    assert "2 shards, 31 documents" in done.output and "written: 2" in done.output
    assert "already complete" not in done.output
    assert "not taken for input: 1 file (README.md)" in done.output
    assert (
        "already complete, and verified: 2"
        in call("tokenize", corpus, out, "-t", tokenizer_file, "--shard-size", "1").output
    )

    shown = call("inspect", out, "--document", "30", "--document", "3").output
    assert "shard_00002, document 0 of 1" in shown and "from b.jsonl, record 1\nanother file" in shown
    place, number = re.search(
        r"document 3 of 30: \d+ tokens, from a.jsonl, record (\d+)\nthe text of document (\d+)", shown
    ).groups()
    assert int(place) == int(number) + 1
    records = [json.loads(line) for line in call("inspect", out, "-n", "31", "--json").output.splitlines()]
    assert len(records) == 31 and all(record["ids"][-1] == 0 for record in records)
    assert (
        call("inspect", out, "--seed", "1", "-n", "5").output != call("inspect", out, "--seed", "2", "-n", "5").output
    )

    assert "2 shards" in call("verify", out).output and "all sound" in call("verify", out).output
    (out / "shard_00002.bin").write_bytes(b"")
    broken, found = call("verify", out), call("verify", out, "--json")
    assert broken.exit_code == found.exit_code == 2
    assert "BAD" in broken.output and "1 of them bad" in broken.output
    first, second = json.loads(found.stdout)
    assert (first["prefix"], first["documents"], first["problems"]) == (str(out / "shard_00001"), 30, [])
    assert second["prefix"] == str(out / "shard_00002") and second["problems"]


def test_inspect_shows_token_ids_on_request(call, corpus, tmp_path, tokenizer, tokenizer_file):
    call("tokenize", corpus, tmp_path / "out", "-t", tokenizer_file)
    shown = call("inspect", tmp_path / "out", "--document", "0", "--tokens").output.splitlines()
    text = shown[-1]
    assert shown[-2].split() == [*map(str, tokenizer.encode(text)), str(tokenizer.eod_id)]


def test_a_dry_run_names_shards_and_writes_nothing(call, corpus, tmp_path):
    done = call("tokenize", corpus, tmp_path / "out", "--dry-run")
    assert done.exit_code == 0 and "shard_00001  2 files" in done.output
    assert not (tmp_path / "out").exists()


def test_ignored_files_are_in_json_and_manifest(call, corpus, tmp_path, tokenizer_file):
    (corpus / "2.jsonl.7z").touch()
    done = call("tokenize", corpus, tmp_path / "out", "-t", tokenizer_file, "--json", "--exclude", "b.*")
    left = [str(corpus / name) for name in ("2.jsonl.7z", "README.md", "b.jsonl")]
    assert json.loads(done.output)["not_taken"] == left
    manifest = ShardManifest.read(tmp_path / "out/shard_00001.manifest.json")
    assert (manifest.not_taken, manifest.not_taken_files) == (3, left)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["raw"], "name at least one input and, last, the folder"),
        (["raw", "raw/a.jsonl"], "the last argument is the folder for the shards"),
        (["raw", "out"], "name a tokenizer with --tokenizer .* --train-tokenizer 8192"),
        (["raw", "out", "-t", "x.json", "--format", "csv"], "--format csv: choose jsonl, parquet, arrow or text"),
        (["raw", "out", "-t", "x.json"], "x.json: no such tokenizer file"),
    ],
)
def test_wrong_usage_says_what_to_write_instead(arguments, message, call, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("tokenize", *arguments)
    assert re.search(message, str(done.exception))
    assert not (tmp_path / "out").exists()


def test_inspect_refuses_other_tokenizers_and_missing_documents(call, corpus, tmp_path, tokenizer_file):
    out = tmp_path / "out"
    call("tokenize", corpus, out, "-t", tokenizer_file)
    assert "there are 31, numbered from 0 to 30" in str(call("inspect", out, "-d", "31").exception)
    other = tmp_path / "other.json"
    other.write_text((out / "tokenizer.json").read_text() + " ")
    assert "another tokenizer would show different text" in str(call("inspect", out, "-t", other).exception)
    (out / "tokenizer.json").unlink()
    assert "with --tokenizer" in str(call("inspect", out).exception)


@pytest.mark.parametrize("verb", ["tokenize", "inspect", "verify", "adopt"])
def test_help_has_two_examples_and_every_default(verb, call):
    text = call(verb, "--help").output
    assert text.count(f"blackmamba data {verb}") == 2


@pytest.mark.parametrize(
    "number, text", [(0, "0"), (999, "999"), (1_234_567, "1.23M"), (3e11, "300G"), (1.8485e12, "1.849T")]
)
def test_large_numbers_are_short(number, text):
    assert short(number) == text


def test_unwritable_folder_is_one_line_and_code_2(corpus, tokenizer_file):
    for command in (["megatron_blackmamba", "data", "tokenize"], ["data_tools"]):
        command = [sys.executable, "-m", *command, corpus, "/dev/null/x", "-t", tokenizer_file]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert "/dev/null/x: Not a directory" in done.stderr and "Traceback" not in done.stderr
