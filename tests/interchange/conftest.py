import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
_modeling_files = tempfile.TemporaryDirectory(prefix="modeling_files_")
os.environ["HF_MODULES_CACHE"] = _modeling_files.name

import pytest
import torch

from tests.reference import Tiny, tiny
from tests.reference.canonical import write_tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def silu() -> Tiny:
    return tiny("silu")


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
