import json
import math

import pytest

from megatron_blackmamba.training.metrics import StepMetrics, read_metrics, router_load

NAMED = [
    *("step", "consumed_samples", "consumed_tokens", "loss", "grad_norm", "learning_rate"),
    *("tokens_per_second", "step_seconds", "skipped"),
]


def metrics(step=1, **changes):
    values = {
        "step": step,
        "consumed_samples": 16 * step,
        "consumed_tokens": 2048 * step,
        "loss": 3.25,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 1234.5,
        "step_seconds": 1.6,
        "skipped": False,
        "source_loss": {"pile": 3.0, "code": 3.5},
        "source_samples": {"pile": 10, "code": 6},
        "memory_bytes": 2**30,
    }
    return StepMetrics(**{**values, **changes})


def test_a_line_has_the_promised_fields_and_leaves_out_what_was_not_measured():
    record = json.loads(metrics().to_json())
    assert list(record)[: len(NAMED)] == NAMED
    assert not {"router_load", "validation_loss", "mfu"} & set(record)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null_so_that_any_json_reader_can_read_the_line(bad):
    line = metrics(loss=bad, grad_norm=bad, skipped=True, source_loss={"pile": bad}).to_json()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None and record["grad_norm"] is None and record["source_loss"] == {"pile": None}


def test_a_loss_read_back_is_the_same_to_the_last_bit():
    loss = 3.0000000000000004
    assert json.loads(metrics(loss=loss).to_json())["loss"] == loss


def test_router_load_is_one_when_even_and_the_number_of_experts_when_collapsed():
    assert router_load([5, 5, 5, 5]).max_over_mean == 1
    collapsed = router_load([0, 0, 20, 0])
    assert collapsed.max_over_mean == 4 and collapsed.shares == [0, 0, 1, 0]


def test_a_line_cut_short_by_a_crash_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics(1).to_json() + "\n" + metrics(2).to_json()[:40])
    assert [record["step"] for record in read_metrics(path)] == [1]
    assert list(read_metrics(tmp_path / "none")) == []


def test_damaged_lines_are_skipped_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [metrics(1).to_json().encode(), b"", b"\0\0", b"[1]", b'{"loss": 1}', metrics(2).to_json().encode(), b""]
    path.write_bytes(b"\n".join(lines))
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
