"""The report and the comparison show the tasks of length."""

import re

import pytest

from megatron_blackmamba.formats.evaluations import Evaluation, ScoringKey, TaskResult
from megatron_blackmamba.report.html import page
from megatron_blackmamba.report.length import by_position, section
from tests.pages import check_page


def of(task, rows, **counts):
    key = ScoringKey("m", task, "1", "d", "3", "float32", "joint", None, 256)
    return TaskResult(key, {}, {}, 2, {}, 1.0, counts=counts, rows=rows)


def loss(values, unit="bits_per_byte"):
    ends = [0, 64, 128, 256]
    rows = [
        {"from": a, "to": b, unit: v, f"window_{unit}": 2.0} for a, b, v in zip(ends, ends[1:], values, strict=False)
    ]
    return of("length:loss", rows, joined=1)


def test_each_model_has_a_curve_and_its_windows():
    passkey = of("length:passkey", [{"length": 128, "depth": d, "accuracy": d, "gain_bits": 3 * d} for d in (0.0, 1.0)])
    found = {
        "mamba": Evaluation("mamba", 1, (loss([3.0, 2.5, 1.9]), passkey)),
        "attention": Evaluation("attention", 1, (loss([3.0, 2.5, 9.0]),)),
        "unscored": None,
    }
    text = section(found)
    check_page(page("Length", "<h1>Length</h1>", [text], ""))
    assert re.findall(r"<title>([^<]+)</title>", text) == [
        *("mamba", "mamba, in windows", "attention", "attention, in windows"),
        *("mamba", "attention"),
    ]
    _, less = by_position({name: scores.by_task()["length:loss"] for name, scores in found.items() if scores})
    assert [curve.y.tolist() for curve in less.curves] == [pytest.approx([1, 0.5, -0.1]), [1, 0.5, 7]]
    assert "Loss by position, bits per byte</figcaption>" in text
    assert "<td>0%, +0.00</td><td>100%, +3.00</td>" in text
    assert section({"unscored": None, "other": Evaluation("other", 1)}) == ""


def test_nats_are_drawn_where_tokenizer_tells_no_bytes():
    assert "nats per token</figcaption>" in section(
        {"one": Evaluation("one", 1, (loss([3.0, 2.0, 1.0], "nats_per_token"),))}
    )
