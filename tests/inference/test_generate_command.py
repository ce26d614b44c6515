"""`blackmamba generate` as a user types it."""

import json

import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.inference import load
from megatron_blackmamba.inference.sampling import GenerationError
from megatron_blackmamba.interchange import hf
from tests.reference import tiny
from tests.reference.canonical import canonical, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    hf.write(canonical(tiny(), tokenizer=write_tokenizer(folder / "source.json")), folder)
    return folder


def run(folder, *arguments):
    words = ["generate", str(folder), "--max-new-tokens", "8", *map(str, arguments)]
    return CliRunner().invoke(app, words, catch_exceptions=False)


def test_text_follows_the_prompt(folder):
    expected = load(folder).generate("a state", max_new_tokens=8)
    assert run(folder, "-p", "a state", "--temperature", 0).output == f"a state{expected}\n"


def test_several_texts_stand_apart(folder):
    words = ("-p", "a state", "-p", "so", "-n", 2, "--temperature", 0)
    expected = [prompt + load(folder).generate(prompt, max_new_tokens=8) for prompt in ("a state", "so") for _ in "12"]
    assert run(folder, *words).output == "\n\n".join(expected) + "\n"


def test_prompts_come_from_a_file(folder, tmp_path):
    lines, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("a state\n\nso\n")
    records.write_text('{"prompt": "a state"}\n{"prompt": "so", "id": 3}\n')
    answers = [json.loads(run(folder, "--prompts", path, "-n", 2, "--json").output) for path in (lines, records)]
    assert answers[0] == answers[1]
    assert [answer["prompt"] for answer in answers[0]] == ["a state", "a state", "so", "so"]


def test_only_line_ends_part_prompts(folder, tmp_path):
    for name, text in (("prompts.txt", "a\x0cb\u2028c\r\nso\n"), ("prompts.jsonl", '{"prompt": "a\u2028c"}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig", newline="")  # some editors mark UTF-8 in front
    prompts = [
        [answer["prompt"] for answer in json.loads(run(folder, "--prompts", tmp_path / name, "--json").output)]
        for name in ("prompts.txt", "prompts.jsonl")
    ]
    assert prompts == [["a\x0cb\u2028c", "so"], ["a\u2028c"]]


def test_json_streams_a_line_a_piece(folder):
    options = ["-p", "a state", "-n", 2, "--seed", 5, "--json"]
    pieces = [json.loads(line) for line in run(folder, *options, "--stream").output.splitlines()]
    texts = ["".join(piece["text"] for piece in pieces if piece["sample"] == sample) for sample in (0, 1)]
    assert texts == [answer["text"] for answer in json.loads(run(folder, *options).output)]
    assert sorted(piece["sample"] for piece in pieces if piece["finished"]) == [0, 1]


def test_bad_requests_are_refused(folder, tmp_path):
    assert "--prompts FILE" in run(folder).output
    assert "With several, add --json" in run(folder, "-p", "a", "-n", 2, "--stream").output
    with pytest.raises(GenerationError, match="temperature must be a finite number"):
        run(folder, "-p", "a", "--temperature", "nan")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(GenerationError, match='line 2 has no "prompt"'):
        run(folder, "--prompts", path)


@pytest.mark.parametrize("words", [["a state"], ["--start", "a state"], ["-p", "a state"]])
def test_prompt_is_an_argument_or_an_option(folder, words):
    answers = json.loads(run(folder, *words, "--json").output)
    assert [answer["prompt"] for answer in answers] == ["a state"]
