import atexit
import os
import shutil
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modeling_files_")

import pytest
import torch

from tests.reference import Tiny, tiny
from tests.reference.canonical import write_tokenizer

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def silu() -> Tiny:
    return tiny("silu")


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
