import json
import os
import subprocess
import sys
import textwrap
from datetime import datetime

import pytest
import yaml

from megatron_blackmamba.config import load
from megatron_blackmamba.formats.events import Resumed, Saved, Spike, read_events
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.record import loggers as module
from megatron_blackmamba.training.record.journal import Journal
from megatron_blackmamba.training.record.line_file import LineFile
from megatron_blackmamba.training.record.logger import Logger
from megatron_blackmamba.training.record.loggers import EventsFile, LoggingError, LogText, MetricsFile
from megatron_blackmamba.training.record.tensorboard import TensorBoard
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


def test_a_very_long_torn_line_is_removed_too(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"whole\n" + b"x" * 200_000)
    LineFile(path).close()
    assert path.read_bytes() == b"whole\n"


def test_restart_before_the_first_checkpoint_empties_the_file(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.step(metrics(1))
    file.rewind(0)
    file.step(metrics(1))
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


@pytest.mark.parametrize(
    "bad",
    [b"\n", b'{"step": 3, "lo\n', b"\0" * 50 + b"\n", b"\xff\n", b"7\n", b'{"step": "4"}\n', b"[" * 90_000 + b"\n"],
)
@pytest.mark.parametrize("place", [0, 3, 6])
def test_damaged_line_of_metrics_is_set_aside(tmp_path, bad, place):
    path, said = tmp_path / "metrics.jsonl", []
    lines = [metrics(step).to_json().encode() + b"\n" for step in range(1, 7)]
    path.write_bytes(b"".join([*lines[:place], bad, *lines[place:]]))
    resumed = MetricsFile(path, said.append)
    resumed.rewind(4)
    resumed.step(metrics(5))
    resumed.close()
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == bad
    assert said == [f"{path}: 1 damaged lines set aside in metrics.jsonl.damaged"]


def test_missing_metrics_are_named_on_resume(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    path.write_text(metrics(1).to_json() + "\n" + metrics(2).to_json() + "\n")
    MetricsFile(path, said.append).rewind(4)
    assert said == [f"{path}: ends at step 2; the records up to step 4 are missing"]


@pytest.mark.parametrize("kind", [MetricsFile, EventsFile, LogText])
def test_folder_in_place_of_log_is_set_aside(tmp_path, kind):
    path = tmp_path / "log"
    (path / "inside").mkdir(parents=True)
    log = kind(path)
    log.rewind(0)
    log.step(metrics(1))
    log.event(Saved(step=1), datetime.now())
    log.close()
    assert "step" in path.read_text() and (tmp_path / "log.damaged" / "inside").exists()


def limited(tmp_path, body):
    """Run a program in which files may not grow beyond `limit(bytes)`: it stands for a full disk."""
    program = f"""
import resource, signal, sys
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from megatron_blackmamba.config import load
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.events import LoggingProblem
from megatron_blackmamba.training.record import loggers
from megatron_blackmamba.training.record.journal import Journal
from megatron_blackmamba.training.record import line_file
from tests.training.test_metrics import metrics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
def limit(size=hard):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
folder = Path({str(tmp_path)!r})
{body}
"""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)


def test_waiting_lines_are_written_at_the_end(tmp_path):
    limited(
        tmp_path,
        """
file = loggers.MetricsFile(folder / "metrics.jsonl")
file.step(metrics(1)); limit(500)
for step in range(2, 31): file.step(metrics(step))
limit(); file.close()
""",
    )
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(1, 31))


def test_waiting_lines_survive_a_rewind(tmp_path):
    limited(
        tmp_path,
        """
file = loggers.MetricsFile(folder / "metrics.jsonl")
file.step(metrics(1)); limit(500)
for step in range(2, 9): file.step(metrics(step))
file.rewind(5); limit()
for step in range(6, 9): file.step(metrics(step))
file.close()
""",
    )
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(1, 9))


def test_end_says_which_lines_are_missing(tmp_path):
    ended = limited(
        tmp_path,
        """
line_file.LAST_SECONDS = 0.3
run = RunFolder(folder / "run")
both = Journal(load("tiny", ["logging.tensorboard=false"]), run)
both.step(metrics(1)); both.event(LoggingProblem(problem="x" * 1000), 1)
limit(run.metrics.stat().st_size + 100)
for step in range(2, 16): both.step(metrics(step))
both.close()
""",
    )
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [1]
    assert "metrics.jsonl: 14 lines could not be written: " in ended.stdout
    assert "log.txt: 15 lines could not be written: File too large" in ended.stderr


def test_optional_logger_that_cannot_start_is_off(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.tensorboard.write_text("not a folder")
    config = load("tiny", ["logging.tensorboard=true"])
    loggers = Journal(config, run)
    loggers.step(metrics(1))
    loggers.close()
    assert "TensorBoard failed and is off from here on" in run.log.read_text() and steps_in(run.metrics) == [1]


def test_tensorboard_gets_all_steps_after_a_full_disk(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = limited(
        tmp_path,
        """
from megatron_blackmamba.training.record import tensorboard
tensorboard.FLUSH_SECONDS = tensorboard.RETRY_SECONDS = 0
run = RunFolder(folder / "run")
both = Journal(load("tiny"), run)
both.step(metrics(1)); limit(100)
for step in range(2, 100): both.step(metrics(step))
limit()
for step in range(100, 103): both.step(metrics(step))
both.close()
""",
    )
    run = RunFolder(tmp_path / "run")
    text = run.log.read_text()
    assert text.count("TensorBoard cannot be written and is tried again") == 1, text
    assert "TensorBoard: all curves are written again" in text
    assert "Traceback" not in ended.stderr and "Exception in thread" not in ended.stderr
    seen = EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in seen.Scalars("loss")] == list(range(1, 103))


def test_waiting_records_are_visible_from_outside(tmp_path):
    ended = limited(
        tmp_path,
        """
run = RunFolder(folder)
both = Journal(load("tiny", ["logging.tensorboard=false"]), run)
both.step(metrics(1)); limit(300)
print([path.name for path in run.waiting()])
for step in range(2, 4): both.step(metrics(step))
print(sorted(path.name for path in run.waiting()))
limit(); both.step(metrics(4))
print([path.name for path in run.waiting()])
""",
    )
    said = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    assert said == ["[]", "['log.txt.waiting', 'metrics.jsonl.waiting']", "[]"]


def test_standard_output_on_full_disk_loses_no_line(tmp_path):
    output = tmp_path / "rank-0.log"
    limited(
        tmp_path,
        f"""
import os
os.dup2(os.open({str(output)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
from megatron_blackmamba.training.record.display import Display
from megatron_blackmamba.formats.events import Saved
from datetime import datetime
display = Display(load("tiny"))
display.step(metrics(1)); limit(130)  # within a line
for step in range(2, 30): display.step(metrics(step))
display.event(Saved(step=29), datetime.now())
limit(); display.step(metrics(30))
""",
    )
    lines = output.read_text().splitlines()
    assert [line.split("  ")[0] for line in lines] == [*(f"step {n}" for n in range(1, 30)), "saved step 29", "step 30"]


def test_other_threads_still_report_their_failures(tmp_path):
    ended = limited(
        tmp_path,
        """
import threading
Journal(load("tiny"), RunFolder(folder / "run")).close()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
""",
    )
    assert "ZeroDivisionError" in ended.stderr


def test_the_log_keeps_every_attempt_with_times(tmp_path):
    log = LogText(tmp_path / "log.txt")
    log.step(metrics(7, skipped=1))
    log.rewind(3)
    resumed = Resumed(step=3, sample=48, steps_left=5, tokens_per_step=1024, changes=["optimizer.clip: 2 now"])
    log.event(resumed, datetime(2026, 1, 31, 12))
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert "step 7" in lines[0] and "skipped" in lines[0]
    assert lines[1:] == [
        "2026-01-31 12:00:00  resumes after step 3, at sample 48, 5 steps of 1024 tokens to go",
        "2026-01-31 12:00:00  optimizer.clip: 2 now",
    ]


def events(*steps):
    return [Spike(step=step, reason="a spike", action="skip", samples=[(16 * step, 16 * step + 15)]) for step in steps]


def test_events_of_interrupted_attempts_stay(tmp_path):
    first = EventsFile(tmp_path / "events.jsonl")
    for event in events(7, 8):
        first.event(event, datetime.now())
    resumed = EventsFile(tmp_path / "events.jsonl")  # the first one was killed: it is never closed
    resumed.rewind(4)
    resumed.event(Saved(step=5), datetime.now())
    assert [found.event.step for found in read_events(tmp_path / "events.jsonl")] == [7, 8, 5]


@pytest.mark.parametrize(
    "bad", [b"\n", b'{"step": 3, "ki\n', b"\0\n", b"\xff\n", b'{"time": "now", "kind": "saved"}\n']
)
def test_damaged_line_of_events_is_set_aside(tmp_path, bad):
    path, said = tmp_path / "events.jsonl", []
    before, after = (event.to_json(datetime.now()).encode() + b"\n" for event in events(1, 2))
    path.write_bytes(before + bad + after + after[:30])
    resumed = EventsFile(path, said.append)
    resumed.rewind(2)
    resumed.close()
    assert path.read_bytes() == before + after and said == [
        f"{path}: 1 damaged lines set aside in events.jsonl.damaged"
    ]
    assert (tmp_path / "events.jsonl.damaged").read_bytes() == bad


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, load("tiny"))
    for step in (1, 2, 3):
        board.step(metrics(step, loss=float(step)))
    board.rewind(1)
    board.step(metrics(2, loss=20.0))
    board.close()
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    shown = seen.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert yaml.safe_load(textwrap.dedent(shown))["model"]["pattern"] == "MEME"
    assert {"grad_norm", "learning_rate", "source/loss/pile"} <= set(seen.Tags()["scalars"])


def test_failing_logger_is_disabled_and_training_continues(tmp_path):
    class Broken(Logger):
        def step(self, record):
            raise OSError("no space left on device")

    run = RunFolder(tmp_path)
    both = Journal(load("tiny", ["logging.tensorboard=false"]), run)
    both._optional.append(Broken())
    both.step(metrics(1))
    both.step(metrics(2))
    text = run.log.read_text()
    assert text.count("Broken failed") == 1 and "no space left" in text and "step 2" in text


def test_only_the_first_rank_writes(tmp_path):
    loggers = Journal(load("tiny"), RunFolder(tmp_path / "run"), rank=1, ranks=2)
    loggers.step(metrics(1))
    loggers.close()
    assert not (tmp_path / "run").exists()


def test_missing_wandb_is_refused_with_an_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    config = load("tiny", ["logging.wandb=offline", "logging.tensorboard=false"])
    with pytest.raises(LoggingError, match=r"pip install .*wandb"):
        Journal(config, RunFolder(tmp_path))


def test_wandb_offline_records_one_run_across_resumes(tmp_path):
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
