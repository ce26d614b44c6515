"""Paths that people type by mistake are refused in words, instead of a traceback."""

import pytest
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.cli.errors import in_words
from megatron_blackmamba.formats import atomic

COMMANDS = [
    *("config X", "new X", "data mixture X", "data inspect X", "data verify X", "data adopt X --tokenizer X"),
    *("export hf X out", "import hf X out", "runs X"),
]
PATHS = [".", "..", "/", ".bin", "no/such/folder", "damaged.yaml", "中文", "x" * 300]


@pytest.mark.parametrize("command", COMMANDS)
def test_awkward_paths_are_refused_in_words(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.yaml").write_text("a: [\x00")
    (tmp_path / ".bin").write_bytes(b"12345678")
    for path in PATHS:
        words = [path if word == "X" else word for word in command.split()]
        done = CliRunner().invoke(cli.app, words)
        error = done.exception
        assert isinstance(error, SystemExit | None) or in_words(error), f"{words}: {error!r}"


def test_folder_in_place_of_output_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (".", "/", tmp_path):
        with pytest.raises(IsADirectoryError) as refused:
            atomic.write_text(path, "")
        assert in_words(refused.value).startswith(f"{path}: Is a directory")
