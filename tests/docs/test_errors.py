"""The first hour's mistakes, made: docs/troubleshooting.md says what they are answered with, and that is what comes."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.config import load, to_saved, to_yaml
from megatron_blackmamba.launch import software

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROW = re.compile(r"^\| `(blackmamba [^`]+)` \| `([^`]+)` \|", re.MULTILINE)


@pytest.fixture
def first_hour(tmp_path, monkeypatch):
    """A working folder with a run, a run that has only begun, and a text."""
    for name in ("tiny", "new"):
        run = tmp_path / "runs" / name
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text(to_yaml(load("tiny")))
    (tmp_path / "runs/tiny/checkpoints/latest").write_text("step_00000001\n")
    (tmp_path / "runs/tiny/checkpoints/step_00000001").mkdir()
    state = {"config": to_saved(load("tiny"))}
    (tmp_path / "runs/tiny/checkpoints/step_00000001/state.json").write_text(json.dumps(state))
    (tmp_path / "runs/tiny/checkpoints/step_00000001" / manifest.NAME).write_text("{}")
    record = {"step": 1, "loss": 1.0, "consumed_samples": 16, "consumed_tokens": 2048, "speed/tokens_per_second": 1.0}
    record |= {"learning_rate": 1e-3, "grad_norm": 1.0, "speed/step_seconds": 1.0}
    (tmp_path / "runs/tiny/metrics.jsonl").write_text(str(record).replace("'", '"') + "\n")
    cut = tmp_path / "archive/tiny/checkpoints/step_00000001"
    shutil.copytree(tmp_path / "runs/tiny", tmp_path / "archive/tiny")  # moved, without its weights
    for file in manifest.REQUIRED:
        (cut / file).touch()
    listed = {file: manifest.describe(cut / file) for file in manifest.REQUIRED}
    manifest.write(cut, 1, {**listed, "__0_0.distcp": {"bytes": 1, "sha256": "0" * 64}}, {})
    (tmp_path / "text.jsonl").write_text('{"text": "Once"}\n')
    monkeypatch.chdir(tmp_path)


def typed(monkeypatch, *words):
    """The command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", list(words))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("line, answer", ROW.findall(PAGE))
def test_what_the_page_says_is_answered(line, answer, first_hour, session, tmp_path, monkeypatch, capfd):
    if "--device cuda" in line and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    words = shlex.split(line)
    if words[1] == "train":  # it joins a process group and catches signals: not in this process
        done = session.run(line, tmp_path)
        code, said = done.returncode, done.stdout
    else:
        code, said = typed(monkeypatch, *words), capfd.readouterr().err
    assert code == 2
    assert answer in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "number, advice, code",
    [
        (errno.ENOSPC, "another disk", 2),
        (errno.EROFS, "this user may use", 2),
        (errno.EACCES, "this user may use", 2),
        (errno.ESTALE, "run the same command again", 1),  # a launcher does that
    ],
)
def test_full_disk_is_named_with_a_remedy(number, advice, code, first_hour, monkeypatch, capsys):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number), "runs/tiny/report.html")

    monkeypatch.setattr("megatron_blackmamba.report.write_report", fails)
    assert typed(monkeypatch, "blackmamba", "report", "runs/tiny") == code
    said = capsys.readouterr().err
    assert said.startswith(f"blackmamba: runs/tiny/report.html: {os.strerror(number)}")
    assert advice in said


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_few_open_files_name_their_limit(number, first_hour, monkeypatch, capsys):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("megatron_blackmamba.report.write_report", fails)
    assert typed(monkeypatch, "blackmamba", "report", "runs/tiny") == 2
    assert capsys.readouterr().err.startswith(f"blackmamba: {os.strerror(number)}: raise the limit (`ulimit -n`)")


def test_own_bugs_keep_tracebacks_unless_dependencies_are_old(first_hour, monkeypatch, capsys):
    def fails(*_, **__):
        raise AttributeError("no such name")

    monkeypatch.setattr("megatron_blackmamba.report.write_report", fails)
    monkeypatch.setattr(sys, "argv", ["blackmamba", "report", "runs/tiny"])
    with pytest.raises(AttributeError):
        cli.main()
    real = software.metadata.version
    monkeypatch.setattr(software.metadata, "version", lambda name: "2.4.1" if name == "torch" else real(name))
    assert typed(monkeypatch, "blackmamba", "report", "runs/tiny") == 2
    assert "torch 2.4.1 is here, and this project needs >=2.9" in capsys.readouterr().err


def no_memory_on_the_gpu(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize(
    ("fails", "who", "code"),
    [
        (lambda *_, **__: torch.empty(2**60), "machine", 2),
        (no_memory_on_the_gpu, "GPU", 1),  # a launcher tries again
    ],
)
def test_lack_of_memory_names_the_micro_batch(first_hour, monkeypatch, capsys, fails, who, code):
    monkeypatch.setattr("megatron_blackmamba.report.write_report", fails)
    assert typed(monkeypatch, "blackmamba", "report", "runs/tiny") == code
    said = capsys.readouterr().err
    assert said.startswith(f"blackmamba: this {who} is out of memory") and "training.micro_batch" in said


def test_a_taken_port_is_named(first_hour, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("The server socket has failed to listen. code: -98, name: EADDRINUSE")

    monkeypatch.setattr("megatron_blackmamba.report.write_report", fails)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert typed(monkeypatch, "blackmamba", "report", "runs/tiny") == 1  # a launcher tries again, with another port
    assert "port 29500 is in use" in capsys.readouterr().err


def test_extras_are_named_as_the_checkout_installs_them():
    """No index has this project."""
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for file in (*(ROOT / "megatron_blackmamba").rglob("*.py"), *(ROOT / "docs").rglob("*.md")):
        text = file.read_text()
        assert not re.search("install (-U )?.?megatron-blackmamba", text), file
        assert set(re.findall(r"-e '\.\[(\w+)\]'", text)) <= set(extras), file


def install(tmp_path, python, version):
    """scripts/install.sh with an interpreter that says it is `version`, and in which nothing can be installed."""
    fake = tmp_path / python
    fake.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exit 1\nPATH={os.environ["PATH"]}; exec {sys.executable} -c "'
                    f'import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2"\n')  # fmt: skip
    fake.chmod(0o755)
    return subprocess.run(
        ["bash", ROOT / "scripts" / "install.sh"],
        env={**os.environ, "PYTHON": str(fake), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
    )


def test_old_python_and_missing_venv_get_a_remedy(tmp_path):
    old = install(tmp_path, "python3.9", (3, 9, 18))
    assert (old.returncode, old.stdout) == (2, "")
    assert "Python 3.9 is not supported: 3.10 to 3.13 is" in old.stderr
    bare = install(tmp_path, "python3.12", (3, 12, 1))
    assert bare.returncode == 2
    assert "could not make the virtual environment" in bare.stderr
    assert "python3.12-venv" in bare.stderr


@pytest.mark.parametrize("group", [(), ("data",), ("export",), ("import",)])
def test_groups_without_a_command_list_their_commands(group):
    done = CliRunner().invoke(cli.app, list(group))
    assert ("Commands" if group else "Train") in done.output and "Missing command" not in done.output
