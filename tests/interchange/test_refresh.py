"""Exports of earlier versions get this version's code and write the same text."""

import json
import os
import signal
import tarfile

import pytest
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.interchange import hf
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.refresh import refresh
from tests.interchange.release import RELEASED, written
from tests.reference.canonical import canonical

EXPORTS = sorted(RELEASED.glob("*.json"))
"""Tiny exports as released versions wrote them, and what they wrote after a prompt."""


@pytest.fixture(params=EXPORTS, ids=[path.stem for path in EXPORTS])
def released(request, tmp_path):
    with tarfile.open(request.param.with_suffix(".tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "export", json.loads(request.param.read_text())


def other_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".py"}


def test_a_released_export_writes_the_same_text(released):
    folder, expected = released
    before = other_files(folder)
    (folder / "old_blackmamba.py").write_text("raise ImportError\n")
    done = CliRunner().invoke(cli.app, ["export", "refresh", str(folder), "--check", "none"], catch_exceptions=False)
    assert "removed old_blackmamba.py (+0 -1 lines)" in done.stdout
    assert other_files(folder) == before
    assert sorted(path.name for path in folder.glob("*.py")) == sorted(hf.MODELING_FILES)
    assert written(folder) == expected["text"]
    assert refresh(folder) == []


@pytest.mark.parametrize("kills_at", range(3))
def test_a_killed_refresh_is_finished_by_the_next(released, kills_at):
    folder, _ = released
    refresh(folder)
    for file in hf.code_files(folder)[:3]:
        file.write_text("stale\n")
    replace, done = os.replace, []

    def dying(*paths):
        if len(done) == kills_at:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(replace(*paths))

    if (child := os.fork()) == 0:
        os.replace = dying
        refresh(folder)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(refresh(folder)) == 3 - kills_at
    assert not list(folder.glob(".*")) and refresh(folder) == []


def test_folders_without_our_code_are_refused(silu, tmp_path):
    hf.write(canonical(silu), tmp_path / "export")
    config = tmp_path / "export/config.json"
    content = json.loads(config.read_text())
    for changes, reason in (
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        (
            {"auto_map": {"AutoConfig": "me/model--configuration_blackmamba.BlackMambaConfig"}},
            "from me/model on the hub",
        ),
    ):
        config.write_text(json.dumps(content | changes))
        with pytest.raises(InterchangeError, match=reason):
            refresh(tmp_path / "export")
    with pytest.raises(InterchangeError, match=r"has no config\.json"):
        refresh(tmp_path)
