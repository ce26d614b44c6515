import io
import math
from datetime import datetime

from rich.console import Console

from megatron_blackmamba.config import load
from megatron_blackmamba.formats.events import LoggingProblem
from megatron_blackmamba.training.record.display import Display, step_line
from tests.training.test_metrics import metrics


def shown(terminal, *steps):
    text = io.StringIO()
    display = Display(load("tiny"), Console(file=text, force_terminal=terminal, width=100))
    for step in steps:
        display.step(step)
    display.close()
    return text.getvalue()


def test_a_terminal_shows_progress_and_everything_one_watches():
    text = shown(True, metrics(50), metrics(100, speed__mfu=0.413, validation__loss=2.5, validation__loss__pile=2.875))
    for wanted in (
        "100/200",
        "3.2500",
        "1.000e-03",
        "0.500",
        "1,23",
        "41.3%",
        "ETA 0:02:40",
        "2.5000",
        "2.875",
        "pile",
    ):
        assert wanted in text, wanted


def test_without_a_terminal_each_step_is_one_line():
    text = shown(False, metrics(198), metrics(199), metrics(200))
    assert text.count("\n") == 3
    assert "\x1b" not in text and "ETA 0:00:02" in text
    assert "gradient norm 0.500" in text.split("  ")


def test_time_left_accounts_for_a_changed_batch():
    half_way = metrics(50, consumed_samples=1600)  # of 3,200
    text = shown(True, metrics(49, consumed_samples=1568), half_way)
    assert "50/150" in text and "ETA 0:02:40" in text


def test_skipped_step_names_its_reason():
    line = step_line(metrics(3, loss=math.nan, skipped=1))
    assert "skipped" in line and "loss –" in line


def test_brackets_in_a_message_are_text_not_markup():
    text = io.StringIO()
    display = Display(load("tiny"), Console(file=text, force_terminal=False))
    problem = LoggingProblem(problem="resume.allow=[optimizer.learning_rate]")
    display.event(problem, datetime.now())
    assert "resume.allow=[optimizer.learning_rate]" in text.getvalue()


def test_time_left_does_not_count_slow_first_step():
    text = shown(False, metrics(1, speed__step_seconds=30.0), metrics(2))
    first, second = text.splitlines()
    assert first.endswith("ETA –")
    assert second.endswith("ETA 0:05:17")  # 198 steps of 1.6 s
