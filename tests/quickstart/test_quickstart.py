"""The whole way on this machine, interrupted once, as a newcomer would."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from megatron_blackmamba.config import load, to_yaml
from megatron_blackmamba.quickstart import _program, _refuse_full_disk, stages
from megatron_blackmamba.quickstart.corpus import SOURCES, _text_of, gather
from megatron_blackmamba.quickstart.stages import (
    MINUTES,
    SPEED_STEPS,
    Pace,
    QuickstartError,
    begin,
    train,
    usable_processes,
)
from tests.thorough import thorough

pytestmark = pytest.mark.xdist_group("pages")  # where a session runs


@pytest.fixture(scope="module")
def command(session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, session.command("quickstart", "--minutes", "0.1", "--folder", folder)


def interrupted_at(session, words, *files):
    """Return the output of the command, interrupted as soon as one of the metrics files has grown."""
    before = [size(file) for file in files]
    running = subprocess.Popen(
        words, env=session.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while not any(size(file) > old for file, old in zip(files, before, strict=True)) and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate()
    assert running.returncode == 75, said
    assert "run the same command again" in said
    return said


def size(file):
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def test_full_disk_is_named_before_anything_is_made(tmp_path):
    with pytest.raises(QuickstartError, match=rf"{tmp_path} has .* GB free and the quickstart takes 1e\+09"):
        _refuse_full_disk(tmp_path / "new", needed_gb=1e9)
    _refuse_full_disk(tmp_path / "new", needed_gb=0)
    assert not (tmp_path / "new").exists()


@thorough
def test_interrupted_quickstart_resumes_to_the_end(command, session):
    folder, words = command
    steps = folder / "quickstart" / "metrics.jsonl"
    interrupted_at(session, words, folder / "trial" / "metrics.jsonl", steps)  # the trial goes away when it ends
    interrupted_at(session, words, steps)
    taken = len(steps.read_text().splitlines())
    planned = load([folder / "run.yaml"]).steps

    second = subprocess.run(words, env=session.environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    if taken < planned:  # or else the machine was too busy to interrupt it in time
        assert f"resumes after step {taken}" in (folder / "quickstart" / "log.txt").read_text()
    for promised in ("documents are", "top-1 agreement", "in a browser"):
        assert promised in second.stdout
    samples = json.loads((folder / "samples.json").read_bytes())
    assert all(samples.values())
    page = (folder / "quickstart" / "report.html").read_text()
    assert "<h2>Samples</h2>" in page
    assert {f"source/samples/{s.name}" for s in SOURCES} <= json.loads(steps.read_text().splitlines()[-1]).keys()


@thorough
def test_second_call_reuses_minutes_and_finished_stages(command, session):
    _, words = command
    words = [word for word in words if word not in ("--minutes", "0.1")]
    third = subprocess.run(words, env=session.environment, capture_output=True, text=True)
    assert third.returncode == 0
    assert "fit into 0.1 minutes" in third.stdout
    assert "Done in" in third.stdout


def test_minutes_have_a_default(tmp_path):
    assert begin(tmp_path, None).minutes == MINUTES > 0


def test_changed_minutes_are_refused_after_sizing(tmp_path):
    assert begin(tmp_path, 3).minutes == begin(tmp_path, None).minutes == 3
    with pytest.raises(QuickstartError, match="--fresh to start over"):
        begin(tmp_path, 20)


def test_the_command_is_named_as_typed_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/bin/python")
    assert _program() == f"{tmp_path}/bin/python -m megatron_blackmamba"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/blackmamba").touch()
    assert _program() == "bin/blackmamba"
    (tmp_path / "blackmamba").touch(mode=0o755)
    assert _program() == "blackmamba"


def test_texts_of_another_encoding_are_left_out(tmp_path):
    for name, encoding in (("utf8", "utf-8"), ("latin1", "latin-1")):
        (tmp_path / name).write_text("licence of André", encoding=encoding)
    assert list(_text_of(tmp_path / "utf8")) == ["licence of André"]
    assert list(_text_of(tmp_path / "latin1")) == list(_text_of(tmp_path / "absent")) == []


@pytest.mark.parametrize("gpus, cores, processes", [(0, 2, 2), (0, 1, 1), (1, 16, 1), (8, 16, 2)])
def test_one_process_per_gpu_and_experts_on_two(monkeypatch, gpus, cores, processes):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert usable_processes() == processes


def test_corpus_has_four_kinds_and_disjoint_splits(tmp_path):
    counts = gather(tmp_path)
    assert all(documents > 20 and size > 50_000 for documents, size in counts.values())
    for source in SOURCES:
        parts = [
            set((tmp_path / source.name / f"{part}.jsonl").read_text().splitlines()) for part in ("train", "held_out")
        ]
        assert parts[0].isdisjoint(parts[1])
        assert sum(map(len, parts)) == counts[source.name][0]


@pytest.fixture
def begun(tmp_path):
    """Return a quickstart whose run is planned to take 100 steps of 0.6 s, a minute in all."""
    q = begin(tmp_path, 1 / stages.IN_STEPS)
    tokens = 100 * load("quickstart").tokens_per_step
    q.config.write_text(to_yaml(load("quickstart", [f"training.tokens={tokens}"])))
    q.run.root.mkdir()
    return q


def _take_steps(q, number, seconds):
    record = {"speed/step_seconds": seconds, "loss": 1.0, "consumed_samples": 16}
    q.run.metrics.write_text("".join(json.dumps(record | {"step": n + 1}) + "\n" for n in range(number)))


@pytest.mark.parametrize("seconds, steps", [(0.6, 100), (0.61, 100), (1.2, 50), (0.3, 200), (60.0, 20)])
def test_steps_are_corrected_to_fit_the_minutes(begun, seconds, steps):
    _take_steps(begun, 20, seconds)
    pace = Pace(begun)
    assert pace.is_wrong() == (steps != 100)
    if steps != 100:
        assert f"{steps} instead of 100" in pace.correct()
    assert begun.composed().steps == steps
    assert begun.composed().resume.allow == ([] if steps == 100 else ["training.tokens"])
    _take_steps(begun, 20, 2 * seconds)
    assert not Pace(begun).is_wrong()  # once is enough, also after Ctrl-C


def test_pace_waits_for_enough_steps(begun):
    assert not Pace(begun).is_wrong()  # no metrics yet
    _take_steps(begun, SPEED_STEPS - 1, 60.0)
    assert not Pace(begun).is_wrong()


def test_quickstart_below_a_minute_is_not_corrected(begun):
    _take_steps(begun, 20, 60.0)
    assert not Pace(replace(begun, minutes=0.5)).is_wrong()


@thorough
def test_run_continues_with_corrected_steps(begun, monkeypatch, capfd):
    monkeypatch.setattr(stages, "CHECKED_FROM", 0)
    monkeypatch.setattr(stages, "REPLAN_AFTER", 0.01)
    tiny = load("tiny", [f"training.tokens={5000 * load('tiny').tokens_per_step}", "name=quickstart"])
    begun.config.write_text(to_yaml(tiny.model_copy(update={"folder": str(begun.folder)})))
    train(replace(begun, minutes=0.05, processes=1))
    said = capfd.readouterr().out
    steps = begun.composed().steps
    assert f"slower than measured: {steps:,} instead of 5,000" in said
    resumed = int(re.search(r"resumes after step (\d+)", said)[1])
    assert f"done at step {max(steps, resumed)}\n" in said
    assert max(steps, resumed) < 5000
