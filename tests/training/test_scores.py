"""Checkpoints scored beside training: the files appear, and no failure or kill reaches the run."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_blackmamba.config import ConfigError, load
from megatron_blackmamba.formats.evaluations import is_claimed, read_run
from megatron_blackmamba.formats.events import NotScored
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.settings import EvaluationConfig
from megatron_blackmamba.tokenizer import load_tokenizer
from megatron_blackmamba.training.keep import scores as module
from megatron_blackmamba.training.keep.scores import Scores
from tests.data.corpus import write_mixture, write_shard
from tests.reference.canonical import write_tokenizer
from tests.thorough import thorough
from tests.training.runs import events_of, losses
from tests.training.test_orphans import processes
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("branches")
pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")
SMALL = [
    *("data.kind=mixture", "data.sequence_length=32", "training.global_batch=4", "training.micro_batch=2"),
    *("model.vocab_size=512", "model.pattern=ME", "training.evaluate_every=0"),
    *("training.tokens=768", "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_every=0"),  # 6 steps
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Shards with a tokenizer, and eight questions."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "tokens").mkdir()
    tokenizer = load_tokenizer(write_tokenizer(folder / "tokens" / "tokenizer.json"))
    size = tokenizer.vocab_size
    write_shard(folder / "tokens" / "one", 0, size, document=16, tokenizer=tokenizer.sha256, vocab=size)
    write_mixture(folder, [{"name": "one", "shards": "tokens"}])
    (folder / "questions").mkdir()
    rows = [{"goal": f"the state {i}", "sol1": "runs on", "sol2": "answers", "label": i % 2} for i in range(8)]
    (folder / "questions" / "piqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def settings(corpus, tasks="piqa"):
    data = f"evaluation.data={corpus / 'questions'}"
    return [*SMALL, f"data.mixture={corpus / 'mixture.yaml'}", "evaluation.every=3", f"evaluation.tasks={tasks}", data]


@thorough
def test_checkpoints_are_scored_and_failing_task_hurts_nothing(forks, corpus, tmp_path):
    """Rank 0 scores. The checkpoint of step 4 is kept until it is scored, though only the last one is."""
    scored, failing, plain = (tmp_path / name for name in ("scored", "failing", "plain"))
    for folder, more in ((scored, settings(corpus)), (failing, settings(corpus, "piqa,no_such_task"))):
        job = forks.run(folder, more)
        assert job.wait() == [0, 0], job.output()
    job = forks.run(plain, [*settings(corpus), "evaluation.every=0"])
    assert job.wait() == [0, 0], job.output()
    assert [found.step for found in read_run(scored / "run")] == [4, 6]
    assert [result.questions for found in read_run(scored / "run") for result in found.results] == [8, 8]
    assert not events_of(scored, NotScored) and losses(scored) == losses(plain) == losses(failing)
    assert [event.step for event in events_of(failing, NotScored)] == [4, 6]
    assert "no_such_task" in events_of(failing, NotScored)[0].problem
    assert RunFolder(failing / "run").done.exists() and not read_run(plain / "run")
    assert not list(RunFolder(scored / "run").evaluations.glob("*.claim-*"))


class Sleeping(Scores):
    """Scores by a command that never ends."""

    def command(self, step):
        return ["serve", str(self._folder.root)]


def test_waiting_checkpoints_are_protected_and_scored_at_multiples(tmp_path):
    scores = Sleeping(EvaluationConfig(every=10, data=str(tmp_path)), RunFolder(tmp_path), print)
    for step in (4, 8, 12, 16, 20):
        scores.saved(step)
    assert [step for step in range(30) if is_claimed(tmp_path, step)] == [12, 20] == scores.waiting
    scores.stop()
    assert not scores.busy and not any(is_claimed(tmp_path, step) for step in (12, 20))


def test_scoring_yields_until_the_last_step(tmp_path):
    scores = Sleeping(EvaluationConfig(every=10, data=str(tmp_path)), RunFolder(tmp_path), print)
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def priority():
        wait_until(lambda: processes(tmp_path))  # a process that has just begun has no command line yet
        (pid,) = processes(tmp_path)
        assert scores.busy
        return os.getpriority(os.PRIO_PROCESS, pid)

    scores.saved(10)
    assert priority() == 19
    scores.hurry()
    assert priority() == (own if os.geteuid() == 0 else 19)  # only root may raise it
    scores.stop()
    scores.saved(20)
    assert priority() == own
    scores.stop()


def test_a_moved_folder_costs_scores_alone(tmp_path, monkeypatch):
    """Claims that can neither be renewed nor made do not reach the run."""
    said, run = [], tmp_path / "run"
    scores = Sleeping(EvaluationConfig(every=10, data=str(tmp_path)), RunFolder(run), said.append)
    monkeypatch.setattr(module, "RENEW_SECONDS", -1.0)
    scores.saved(10)
    run.rename(tmp_path / "moved")
    scores.poll()
    run.touch()  # no folder can be made there
    scores.saved(20)
    scores.stop()
    (event,) = said
    assert isinstance(event, NotScored) and event.step == 20 and "cannot be claimed" in event.problem


def test_scoring_ends_with_a_killed_run(forks, corpus, tmp_path):
    job = forks.run(tmp_path, [*settings(corpus), "checkpoint.asynchronous=false"], ranks=1, until=4)
    try:
        wait_until(lambda: any(is_scoring(pid) for pid in processes(tmp_path)), job)
        (pid, *_) = [pid for pid in processes(tmp_path) if is_scoring(pid)]
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.getsid(pid) == os.getsid(job.pids[0])  # or it would share the processors with the run half and half
        assert os.getpgid(pid) == pid  # Ctrl-C does not reach it
        job.kill()
        job.wait()
        wait_until(lambda: not any(b"evaluate" in words(pid) for pid in processes(tmp_path)))
    finally:
        for pid in processes(tmp_path):
            if b"evaluate" in words(pid):
                os.kill(pid, signal.SIGKILL)


def is_scoring(pid):
    """Return whether a process is `blackmamba evaluate`, after the program that lowers its priority."""
    return b"evaluate" in words(pid) and b"runtime.parent" not in words(pid)


def words(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        time.sleep(0.01)
        return b""


def test_scoring_without_questions_is_refused():
    with pytest.raises(ConfigError, match=r"name their folder in evaluation\.data"):
        load("tiny", ["evaluation.every=10"])
