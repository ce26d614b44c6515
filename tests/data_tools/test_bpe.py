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


def test_training_twice_gives_the_same_tokenizer(text, tmp_path):
    first, second = (run(text, tmp_path / name).shards[0].manifest for name in ("one", "two"))
    assert first.tokenizer_sha256 == second.tokenizer_sha256


def test_second_call_uses_the_existing_tokenizer(text, tmp_path):
    run(text, tmp_path / "out")
    assert run(text, tmp_path / "out").written == []


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
    run(text, tmp_path / "out")
    with pytest.raises(InputError, match="has 500 tokens, --train-tokenizer asks for 300"):
        tokenize([text], tmp_path / "out", TokenizeOptions(train_tokenizer=300, quiet=True))


def test_bytes_alone_are_the_smallest_tokenizer(text, tmp_path):
    tokenize([text], tmp_path / "out", TokenizeOptions(train_tokenizer=257, workers=1, quiet=True))
    assert load_tokenizer(tmp_path / "out/tokenizer.json").vocab_size == 257
    with pytest.raises(InputError, match="at least 257"):
        tokenize([text], tmp_path / "out", TokenizeOptions(train_tokenizer=256, workers=1, quiet=True))
