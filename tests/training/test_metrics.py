import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.config import load
from megatron_blackmamba.formats.source_schedule import Schedule
from megatron_blackmamba.formats.step_records import StepRecord, metrics_so_far, read_metrics
from megatron_blackmamba.report import write_report
from megatron_blackmamba.training.metrics import (
    Metric,
    MetricError,
    Taken,
    all_metrics,
    base,
    metric,
    metric_of,
    unregister,
)
from megatron_blackmamba.training.step.progress import Progress
from tests.training import runs

DOCS = Path(__file__).resolve().parents[2] / "docs"


def metrics(step=1, **changes):
    """Return the record of a step; `__` in a keyword stands for `/`."""
    scalars = {
        "loss": 3.25,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "speed/tokens_per_second": 1234.5,
        "speed/step_seconds": 1.6,
        "speed/memory_bytes": 2**30,
        "skipped": 0,
        "consumed_samples": 16 * step,
        "consumed_tokens": 2048 * step,
        "source/loss/pile": 3.0,
        "source/loss/code": 3.5,
        "source/samples/pile": 10,
        "source/samples/code": 6,
    }
    return StepRecord(step, scalars | {name.replace("__", "/"): value for name, value in changes.items()})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scalars_that_are_not_finite_are_null(bad):
    line = metrics(loss=bad, grad_norm=bad, source__loss__pile=bad).to_json()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None and record["grad_norm"] is None and record["source/loss/pile"] is None


def test_truncated_line_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics(1).to_json() + "\n" + metrics(2).to_json()[:40])
    assert [record["step"] for record in read_metrics(path)] == [1]
    assert list(metrics_so_far(tmp_path / "none")) == []
    with pytest.raises(FileNotFoundError, match=r"none: no such file\. Name the metrics\.jsonl"):
        read_metrics(tmp_path / "none")


def test_damaged_lines_are_skipped_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [metrics(1).to_json().encode(), b"", b"\0\0", b"[1]", b'{"loss": 1}', metrics(2).to_json().encode(), b""]
    path.write_bytes(b"\n".join(lines))
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_records_of_older_runs_become_scalars(tmp_path):
    old = {
        "step": 2,
        "loss": 3.0,
        "tokens_per_second": 9.0,
        "mfu": 0.4,
        "source_samples": {"a/b": 7},
        "note": "text",
        "router_load": {"layer_3": {"max_over_mean": 1.5, "shares": [0.75, 0.25]}},
        "validation_loss": {"a/b": 2.5},
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    assert next(read_metrics(tmp_path / "metrics.jsonl")) == {
        "step": 2,
        "loss": 3.0,
        "speed/tokens_per_second": 9.0,
        "speed/mfu": 0.4,
        "source/samples/a/b": 7,
        "note": "text",
        "experts/3/max_over_mean": 1.5,
        "experts/3/share/0": 0.75,
        "experts/3/share/1": 0.25,
        "validation/loss/a/b": 2.5,
    }


@pytest.mark.parametrize(
    "scalar, name, key",
    [
        ("loss", "loss", ""),
        ("validation/loss", "validation/loss", ""),
        ("validation/loss/a/b", "validation/loss/*", "a/b"),
        ("experts/3/max_over_mean", "experts/*/max_over_mean", "3"),
        ("experts/3/share/0", "experts/*/share/*", "3/0"),
        ("nobody/knows", "nobody/knows", ""),
    ],
)
def test_a_scalar_leads_to_its_metric(scalar, name, key):
    assert metric_of(scalar).name == name and metric_of(scalar).key_of(scalar) == key


def test_metric_needs_a_unique_name_and_valid_value():
    with pytest.raises(MetricError, match="two metrics have the name loss"):
        metric("loss", "Loss")(lambda taken: 1.0)
    metric("toy/*", "Toy")(lambda taken: 1.0)
    try:
        with pytest.raises(MetricError, match="a mapping fills"):
            metric_of("toy/*").scalars(None)
    finally:
        unregister("toy/*")


def test_docs_list_exactly_the_metrics():
    table = (DOCS / "records.md").read_text().split("| Scalar | Meaning |")[1].split("\n\n")[0]
    listed = [line.split("|")[1].strip(" `") for line in table.splitlines()[2:]]
    assert listed == [each.name for each in all_metrics()]


def taken_of(**known):
    """Return a step of which only this is known."""
    fields = ("trainable", "utilisation", "losses", "update", "learning_rate", "tokens", "seconds")
    return Taken(**{"config": load("tiny"), "progress": Progress(), "data": None, **dict.fromkeys(fields), **known})


@pytest.mark.parametrize(
    ("how", "value"), [("sum", 10.0), ("mean", 10 / 3), ("max", 5.0), ("norm", 38**0.5), ("weighted", 7 / 12)]
)
def test_reductions_over_ranks(how, value):
    """One of four ranks has no value, and one has another key, as on the stages of a pipeline."""
    weighted = [{"a": (1.0, 2)}, {"a": (5.0, 9)}, {"b": (7.0, 7)}, {"a": (1.0, 1)}]
    plain = [{"a": 2.0}, {"a": 5.0}, {"b": 7.0}, {"a": 3.0}]
    if how == "weighted":
        assert base._reduced("mean", weighted) == pytest.approx({"a": value, "b": 1.0})
    else:
        assert base._reduced(how, plain) == pytest.approx({"a": value, "b": 7.0})


def test_a_maximum_over_ranks_keeps_nan():
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        assert math.isnan(base._reduced("max", [{"a": value} for value in values])["a"])


def test_a_mean_of_nothing_is_nan():
    assert math.isnan(base._reduced("mean", [{"a": (0.0, 0)}, {"a": (0.0, 0)}])["a"])


def test_a_count_needs_a_mean():
    with pytest.raises(MetricError, match="needs reduce='mean'"):
        Metric("odd", lambda taken: (1.0, 2.0), "An odd one", reduce="sum").scalars(None)
    assert Metric("even", lambda taken: (1.0, 2.0), "An even one", reduce="mean").scalars(None) == {"even": (1.0, 2.0)}


@pytest.mark.xdist_group("forks")
def test_metric_in_its_own_file_is_shown_everywhere(forks, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = ["training.stop_after_steps=4", "logging.tensorboard=true"]
    job = forks.run(tmp_path, [*runs.ON_TWO, *settings], trainer="Weighing")  # with training.overlap
    assert job.wait() == [0, 0], job.output()
    values = {record["step"]: record.get("weights/norm") for record in runs.metrics(tmp_path)}
    assert values[2] > 1 and values[1] is values[3] is None
    saved = CheckpointReader(tmp_path / "run")
    assert values[4] == pytest.approx(math.hypot(*(saved.tensor(name).double().norm() for name in saved.shapes())))
    for shown in (job.output(), runs.log(tmp_path)):
        assert f"weight norm {values[4]:.2f}" in shown
    board = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [event.step for event in board.Scalars("weights/norm")] == [2, 4]
    assert "<figcaption>weights/norm</figcaption>" in write_report(tmp_path / "run").read_text()


def test_docs_show_the_example_metric():
    source = (Path(__file__).parent / "weight_norm.py").read_text()
    assert source in (DOCS / "extending.md").read_text()


def test_validation_loss_is_weighted_by_the_mixture():
    """Three sources serve 300, 60 and 40 of 400 samples; the last one has no validation data."""
    train = SimpleNamespace(schedule=Schedule([[15, 3, 2]]))
    data = SimpleNamespace(train=train, source_names=["pile", "code", "none"])
    taken = taken_of(data=data, progress=Progress(next_sample=400, consumed_samples=10**9))
    taken = replace(taken, validation={"pile": 2.0, "code": 3.0})
    found = metric_of("validation/loss").scalars(taken) | metric_of("validation/loss/*").scalars(taken)
    weighted = (300 * 2.0 + 60 * 3.0) / 360
    assert found == {"validation/loss": weighted, "validation/loss/pile": 2.0, "validation/loss/code": 3.0}
    balanced = replace(taken, validation_as_trained={"pile": 1.0, "code": 2.0})
    assert metric_of("validation/loss_balanced").scalars(taken) == {}
    assert metric_of("validation/loss_balanced").scalars(balanced) == pytest.approx(
        {"validation/loss_balanced": weighted - 1}
    )


def test_bits_per_byte_weigh_the_mixture_s_bytes():
    """In 360 samples of which 300 have 4 bytes a token, and 60 have 2."""
    train = SimpleNamespace(schedule=Schedule([[15, 3, 2]]))
    data = SimpleNamespace(train=train, source_names=["pile", "code", "none"])
    taken = taken_of(data=data, progress=Progress(next_sample=400, consumed_samples=10**9))
    taken = replace(taken, validation={"pile": 2.0, "code": 3.0}, bytes_per_token={"pile": 4.0, "code": 2.0})
    both = metric_of("validation/bits_per_byte"), metric_of("validation/bits_per_byte/*")
    found = both[0].scalars(taken) | both[1].scalars(taken)
    bits = (300 * 2.0 + 60 * 3.0) / math.log(2)
    assert found == {
        "validation/bits_per_byte": pytest.approx(bits / (300 * 4 + 60 * 2)),
        "validation/bits_per_byte/pile": pytest.approx(0.5 / math.log(2)),
        "validation/bits_per_byte/code": pytest.approx(1.5 / math.log(2)),
    }
    assert both[0].scalars(replace(taken, bytes_per_token={})) == {}


@pytest.mark.parametrize(
    "name, key, scalar",
    [
        ("odd/*/b/*", "x", None),
        ("odd/*/b/*", ("x", "y", "z"), None),
        ("odd/*", ("x", "y"), None),
        ("odd/*/b/*", ("x", "y"), "odd/x/b/y"),
        ("odd/{0}/{*}", "x", "odd/{0}/{x}"),
    ],
)
def test_keys_fill_every_star_of_a_name(name, key, scalar):
    one = Metric(name, lambda taken: {key: 1.0}, "An odd one")
    if scalar is not None:
        assert one.scalars(None) == {scalar: 1.0}
    else:
        with pytest.raises(MetricError, match=r"has the key .* each `\*` of the name takes one part"):
            one.scalars(None)
