import contextlib
import os
import pty
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize
from megatron_blackmamba.formats.shards import Shard
from megatron_blackmamba.tokenizer import load_tokenizer

SOURCE = Path(textwrap.__file__)


def run(path, out, **options):
    return tokenize([path], out, TokenizeOptions(train_tokenizer=500, workers=1, quiet=True, **options))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(SOURCE.read_text() + "é 漢字")
    return path


def test_trained_tokenizer_lies_beside_shards_and_is_lossless(text, tmp_path):
    run(text, tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out/tokenizer.json")
    shard = Shard.open(tmp_path / "out/shard_00001")
    assert tokenizer.vocab_size == 500 and tokenizer.eod_id == 0
    assert shard.manifest.tokenizer_sha256 == tokenizer.sha256
    assert tokenizer.decode(shard.document(0)[:-1]) == text.read_text()
    assert shard.manifest.tokens < 0.7 * shard.manifest.text_bytes  # it has learned something


def test_end_of_document_must_be_in_trained_tokenizer(text, tmp_path):
    with pytest.raises(ValueError, match="<end>"):
        run(text, tmp_path / "out", eod="<end>")


def test_training_twice_gives_the_same_tokenizer(text, tmp_path):
    first, second = (run(text, tmp_path / name).shards[0].manifest for name in ("one", "two"))
    assert first.tokenizer_sha256 == second.tokenizer_sha256


def test_what_cannot_be_trained_is_refused(text, tmp_path):
    for options, message in (
        ({"train_tokenizer": 100}, "at least 257"),
        ({"array": "0/2"}, "Run it once without --array"),
        ({"tokenizer": "t.json"}, "--train-tokenizer"),
    ):
        everything = TokenizeOptions(**{"train_tokenizer": 500, "workers": 1, "quiet": True, **options})
        with pytest.raises(InputError, match=message):
            tokenize([text], tmp_path / "out", everything)
    with pytest.raises(InputError, match="standard input does not allow"):
        tokenize(["-"], tmp_path / "out", TokenizeOptions(train_tokenizer=500, quiet=True))


def request(text, out, size=500, **options):
    return tokenize([text], out, TokenizeOptions(**{"train_tokenizer": size, "workers": 1, "quiet": True, **options}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 300}, "was trained with --train-tokenizer 500, not 300"),
        ({"train_bytes": 100}, "was trained with --train-bytes 1000000000, not 100"),
        ({"marker": "def "}, "was trained with marker = None, not 'def '"),
    ],
)
def test_another_request_is_refused_or_trains_anew(text, tmp_path, change, message):
    run(text, tmp_path / "out")
    before = (tmp_path / "out/tokenizer.json").read_bytes()
    with pytest.raises(InputError, match=f"{message}.*--overwrite"):
        request(text, tmp_path / "out", **change)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == before
    request(text, tmp_path / "out", **change, overwrite=True)
    assert request(text, tmp_path / "out", **change).written == []


def test_other_text_is_refused_or_trains_anew(text, tmp_path):
    run(text, tmp_path / "out")
    text.write_text("other words " * 500)
    with pytest.raises(InputError, match=r"was trained on text\.txt, whose text has changed"):
        run(text, tmp_path / "out")
    run(text, tmp_path / "out", overwrite=True)
    other = text.rename(tmp_path / "other.txt")
    run(other, tmp_path / "out", overwrite=True)  # the same text under another name: the same tokenizer
    other.write_text(SOURCE.read_text())
    other = other.rename(tmp_path / "third.txt")
    with pytest.raises(InputError, match=r"was trained on text\.txt, not on third\.txt"):
        run(other, tmp_path / "out")


def test_same_text_is_recognised_by_its_content(text, tmp_path):
    run(text, tmp_path / "out")
    text.touch()
    assert run(text, tmp_path / "out").written == []


def test_bad_records_are_counted_by_shard(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some text"}\n' * 5 + "bad\n" * 3)
    summary = tokenize(
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl"],
        tmp_path / "out",
        TokenizeOptions(train_tokenizer=300, workers=1, quiet=True, shard_size="1", max_bad="3"),
    )
    assert summary.rejected == {"invalid JSON": 6}


def test_standard_input_is_refused_before_it_is_read(text, tmp_path, monkeypatch):
    run(text, tmp_path / "out")
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write("a text")
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(InputError, match="standard input does not allow"):
            run("-", tmp_path / "out", format="text")
        assert stdin.read() == "a text"


def test_empty_input_leaves_no_tokenizer(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"no text in .*empty\.txt"):
        run(tmp_path / "empty.txt", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_tokenizer_without_shards_is_replaced(text, tmp_path):
    run(text, tmp_path / "out")
    for file in (tmp_path / "out").glob("shard_*"):
        file.unlink()
    request(text, tmp_path / "out", size=300)
    assert load_tokenizer(tmp_path / "out/tokenizer.json").vocab_size == 300


def test_tokenizer_without_record_is_refused_by_size(text, tmp_path):
    run(text, tmp_path / "out")
    (tmp_path / "out/tokenizer.trained.json").unlink()
    assert run(text, tmp_path / "out").written == []
    with pytest.raises(InputError, match="has 500 tokens, --train-tokenizer asks for 600, and there is no record"):
        request(text, tmp_path / "out", size=600)


def test_smaller_tokenizer_than_asked_is_said(tmp_path, capsys):
    (tmp_path / "few.txt").write_text("a few words, a few words")
    made = request(tmp_path / "few.txt", tmp_path / "out", quiet=False)
    size = load_tokenizer(tmp_path / "out/tokenizer.json").vocab_size
    assert f"only {size} of 500 tokens" in capsys.readouterr().err
    assert size < 500 and made.tokens


def test_bytes_alone_are_the_smallest_tokenizer(text, tmp_path):
    tokenize([text], tmp_path / "out", TokenizeOptions(train_tokenizer=257, workers=1, quiet=True))
    assert load_tokenizer(tmp_path / "out/tokenizer.json").vocab_size == 257
    with pytest.raises(InputError, match="at least 257"):
        tokenize([text], tmp_path / "out", TokenizeOptions(train_tokenizer=256, workers=1, quiet=True))


def test_training_draws_no_bars_of_its_library():
    """On a terminal they would be beside ours."""
    ours, theirs = pty.openpty()
    train = "from megatron_blackmamba.data_tools.bpe import train; train([['some text and more text'] * 9] * 9, 300)"
    subprocess.run([sys.executable, "-c", train], check=True, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    with contextlib.suppress(OSError):  # nothing was written
        assert os.read(ours, 10_000) == b""
    os.close(ours)
