"""A tokenizer trained on this Python's own sources, and raw files to feed it with."""

import json
import textwrap
from pathlib import Path

import pytest

from megatron_blackmamba.data_tools.bpe import train
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize
from megatron_blackmamba.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = Path(textwrap.__file__).read_text() + Path(json.__file__).read_text()
    (folder / "tokenizer.json").write_bytes(train([[text]], 600))
    return folder / "tokenizer.json"


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file):
    return load_tokenizer(tokenizer_file)


@pytest.fixture
def write_jsonl(tmp_path):
    """Write texts as JSON lines under `name`, and return the path."""

    def write(name, texts, field="text"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({field: text}, ensure_ascii=False) + "\n" for text in texts))
        return path

    return write


@pytest.fixture
def run(tokenizer_file, tmp_path):
    """Tokenize into tmp_path/out, one core, no words."""

    def run(*inputs, out="out", **options):
        options = {"tokenizer": str(tokenizer_file), "workers": 1, "quiet": True, **options}
        return tokenize(inputs, tmp_path / out, TokenizeOptions(**options))

    return run
