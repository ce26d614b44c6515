from pathlib import Path

import pytest

from tests.hf.conftest import one_thread, silu
from tests.reference.canonical import write_tokenizer

__all__ = ["one_thread", "silu"]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
