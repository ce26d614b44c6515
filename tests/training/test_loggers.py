import json
import os
import subprocess
import sys

import pytest

from megatron_blackmamba.config import load
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training import loggers as module
from megatron_blackmamba.training.loggers import LineFile, Loggers, LoggingError, LogText, MetricsFile
from tests.training.test_metrics import metrics


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_resuming_at_a_step_leaves_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 8):
        first.step(metrics(step))
    resumed = MetricsFile(path)  # the first one was killed: it is never closed
    resumed.rewind(4)
    for step in range(5, 10):
        resumed.step(metrics(step))
    assert steps_in(path) == list(range(1, 10))


def test_a_line_cut_short_by_a_crash_is_completed_by_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics(1).to_json() + "\n" + metrics(2).to_json()[:50])
    resumed = MetricsFile(path)
    resumed.step(metrics(2))
    assert steps_in(path) == [1, 2]


def test_a_very_long_torn_line_is_removed_too(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"whole\n" + b"x" * 200_000)
    LineFile(path).close()
    assert path.read_bytes() == b"whole\n"


def test_starting_over_before_the_first_checkpoint_begins_an_empty_file(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.step(metrics(1))
    file.rewind(0)
    file.step(metrics(1))
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


def test_lines_that_a_full_disk_refused_are_written_whole_and_in_order_once_there_is_room(tmp_path):
    """A file size limit of the process's own stands for the full disk: writes end halfway through a line, then fail."""
    program = f"""
import resource, signal, sys
sys.path.insert(0, {os.getcwd()!r})
from megatron_blackmamba.training.loggers import LineFile
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (95, hard))
file = LineFile(Path({str(tmp_path / "lines")!r}))
for i in range(20):
    file.write(f"line {{i:03}}")
assert Path({str(tmp_path / "lines")!r}).stat().st_size == 95
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
file.write("line 020")
file.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "lines").read_text().splitlines() == [f"line {i:03}" for i in range(21)]


def test_the_log_keeps_every_attempt_and_says_when(tmp_path):
    log = LogText(tmp_path / "log.txt")
    log.step(metrics(7, skipped=True))
    log.rewind(3)
    log.message("resumed at step 3\nfrom step_00000003")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 3
    assert "step 7" in lines[0] and "skipped" in lines[0] and lines[1].endswith("resumed at step 3")


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = module.TensorBoard(tmp_path)
    for step in (1, 2, 3):
        board.step(metrics(step, loss=float(step)))
    board.rewind(1)
    board.step(metrics(2, loss=20.0))
    board.close()
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    assert {"grad_norm", "learning_rate", "source_loss/pile"} <= set(seen.Tags()["scalars"])


def test_a_logger_that_fails_is_switched_off_and_the_run_goes_on(tmp_path):
    class Broken:
        def step(self, metrics):
            raise OSError("no space left on device")

    log = LogText(tmp_path / "log.txt")
    both = Loggers([log], [Broken()])
    both.step(metrics(1))
    both.step(metrics(2))
    text = (tmp_path / "log.txt").read_text()
    assert text.count("Broken failed") == 1 and "no space left" in text and "step 2" in text


def test_only_the_first_rank_writes(tmp_path):
    loggers = Loggers.for_run(load("tiny"), RunFolder(tmp_path / "run"), first_rank=False)
    loggers.step(metrics(1))
    loggers.close()
    assert not (tmp_path / "run").exists()


def test_a_missing_wandb_is_refused_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    config = load("tiny", ["logging.wandb=offline", "logging.tensorboard=false"])
    with pytest.raises(LoggingError, match=r"pip install .*wandb"):
        Loggers.for_run(config, RunFolder(tmp_path), first_rank=True)


def test_wandb_offline_records_one_run_however_often_it_is_resumed(tmp_path):
    pytest.importorskip("wandb")
    config, run = load("tiny", ["logging.wandb=offline"]), RunFolder(tmp_path)
    identities = set()
    for step in (1, 2):
        logger = module.Wandb(config, run)
        logger.step(metrics(step))
        identities.add(logger._run.id)
        logger.close()
    assert len(identities) == 1
    assert list((tmp_path / "wandb").glob("offline-run-*"))
