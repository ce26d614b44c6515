"""Exports of the tiny reference models, written once, by the writer that users call."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, as is the folder that it runs modeling files from
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modeling_files_")

import pytest
import torch

from megatron_blackmamba.interchange import hf
from tests.reference import Tiny, tiny
from tests.reference.canonical import canonical, write_tokenizer

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def export(tmp_path_factory):
    """`export(tiny_model)` is the folder of its export; the same model is written once."""
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    written: dict[int, tuple[Tiny, Path]] = {}

    def make(model: Tiny) -> Path:
        if id(model) not in written:
            folder = tmp_path_factory.mktemp("export")
            hf.write(canonical(model, tokenizer=tokenizer), folder)
            written[id(model)] = (model, folder)  # with the model, so that its id is not given out again
        return written[id(model)][1]

    return make


@pytest.fixture(scope="session")
def silu() -> Tiny:
    return tiny("silu")


@pytest.fixture(scope="session")
def gelu() -> Tiny:
    return tiny("gelu")


@pytest.fixture(scope="session")
def resetting() -> Tiny:
    return tiny("silu", eod_reset=0)
