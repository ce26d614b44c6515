"""Checkpoints are exported as they appear; a killed exporter continues."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from typer.testing import CliRunner

from megatron_blackmamba import cli
from megatron_blackmamba.checkpoint import following
from megatron_blackmamba.config import to_yaml
from megatron_blackmamba.formats.evaluations import is_claimed
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange import hf, megatron
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.following import export_every
from tests.reference.canonical import canonical
from tests.waiting import Command, wait_until


@pytest.fixture
def run(silu, tmp_path):
    """A finished run that saved steps 10 and 20, and its last step."""
    model, folder = canonical(silu), RunFolder(tmp_path / "run")
    for step in (10, 20, 25):
        path = folder.checkpoint(step)
        megatron.write(model, path)
        facts = json.loads((path / "manifest.json").read_bytes())
        (path / "manifest.json").write_text(json.dumps(facts | {"step": step}))
    config = megatron.run_config(model)
    saved = config.checkpoint.model_copy(update={"every": 10})
    folder.config.write_text(to_yaml(config.model_copy(update={"checkpoint": saved})))
    folder.done.touch()
    return folder.root


def names(out):
    return sorted(path.name for path in out.iterdir())


def test_every_nth_step_and_the_last_are_exported(run, tmp_path):
    words = ["export", "hf", str(run), str(tmp_path / "out"), "--every", "20", "--no-verify", "--dtype", "bf16"]
    told = CliRunner().invoke(cli.app, words, catch_exceptions=False).stdout
    assert names(tmp_path / "out") == [".lock", "step_00000020", "step_00000025"]
    assert f"{tmp_path}/out/step_00000020: " in told
    source, export = megatron.read(run / "checkpoints/step_00000020"), hf.read(tmp_path / "out/step_00000020")
    assert export.dtype == torch.bfloat16 and not any(is_claimed(run, step) for step in (20, 25))
    name = "embedding.word_embeddings.weight"
    assert torch.equal(export.entries[name].load(), source.entries[name].load().bfloat16())


def test_a_killed_exporter_continues(run, tmp_path):
    out = tmp_path / "out"
    words = ["export", "hf", str(run), str(out), "--every", "10", "--no-verify"]
    process = subprocess.Popen([sys.executable, "-m", "megatron_blackmamba", *words], stderr=subprocess.DEVNULL)
    wait_until(lambda: any(out.glob("*step_*")), Command(process))
    process.send_signal(signal.SIGKILL)
    process.wait()
    complete = {path.name: path.stat().st_mtime_ns for path in out.glob("step_*")}
    (out / ".step_00000025.0123abcd.tmp").mkdir(exist_ok=True)
    (out / ".step_00000025.0123abcd.tmp/model.safetensors").touch()
    CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert names(out) == [".lock", "step_00000010", "step_00000020", "step_00000025"]
    assert all((out / name).stat().st_mtime_ns == before for name, before in complete.items())
    assert all(hf.read(out / name).parameters for name in names(out)[1:])


def test_checkpoints_are_protected_and_errors_do_not_stop(run, tmp_path, capsys):
    seen = []

    def export(checkpoint, target, renew):
        renew()
        seen.append((checkpoint.name, target.name, is_claimed(run, int(checkpoint.name[-2:]))))
        if len(seen) == 1:
            raise InterchangeError("its weights hold NaN")

    with pytest.raises(InterchangeError, match=r"1 of 3 checkpoints of .* were not exported: 10. See"):
        export_every(run, tmp_path / "out", 10, export)
    steps = [f"step_000000{step}" for step in (10, 20, 25)]
    assert seen == [(step, step, True) for step in steps]
    assert capsys.readouterr().err == "blackmamba: step 10: its weights hold NaN\n"
    assert not any(is_claimed(run, step) for step in (10, 20, 25))


def test_a_checkpoint_deleted_meanwhile_is_left_out(run, tmp_path, capsys):
    seen = []

    def export(checkpoint, target, renew):
        seen.append(checkpoint.name)
        shutil.rmtree(RunFolder(run).checkpoint(20), ignore_errors=True)

    export_every(run, tmp_path / "out", 10, export)
    assert seen == ["step_00000010", "step_00000025"]
    assert capsys.readouterr().err == "blackmamba: step 20: was deleted before its export\n"


def test_a_run_is_followed_to_its_end(run, monkeypatch, capsys):
    done = RunFolder(run).done
    done.unlink()
    monkeypatch.setattr(following, "POLL_SECONDS", 0.01)
    steps = following.follow(run, 20)
    assert next(steps) == 20  # not yet the last one: the run goes on
    end = threading.Timer(0.1, done.touch)
    end.start()
    assert list(steps) == [25]
    assert capsys.readouterr().err == f"blackmamba: waiting for the next checkpoint of {run}\n"


def test_unusable_calls_are_refused(run, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InterchangeError, match=r"--every 15: the run saves every 10 steps. Give a multiple of 10"):
        export_every(run, out, 15, lambda *_: None)
    with pytest.raises(InterchangeError, match="not a run, which --every needs"):
        export_every(tmp_path / "nothing", out, 10, lambda *_: None)
    out.mkdir()
    with open(out / ".lock", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InterchangeError, match="another process exports to this folder"):
            export_every(run, out, 10, lambda *_: None)
    refused = CliRunner().invoke(cli.app, ["export", "hf", str(run), "o", "--every", "10", "--push-to", "me/model"])
    assert refused.exit_code == 2 and "Leave out --every" in refused.output
