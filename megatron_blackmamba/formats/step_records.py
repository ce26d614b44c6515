"""The record of a step: named scalars, one JSON object a line in metrics.jsonl.

`{"step": 120, "loss": 3.25, "source/loss/pile": 3.1, "speed/tokens_per_second": 51200.0}`: what was not measured at a
step is left out, what is not finite is null. Nested records of older versions are read as named scalars.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLD_NAMES = {
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "memory_bytes": "speed/memory_bytes",
    "mfu": "speed/mfu",
    "slowest_rank": "speed/slowest_rank",
    "slowest_over_median": "speed/slowest_over_median",
    "source_loss": "source/loss",
    "source_samples": "source/samples",
    "validation_loss": "validation/loss",
}
"""Names of older records; those of objects become the beginning of the scalars' names."""


@dataclass(frozen=True)
class StepRecord:
    """The scalars of one step, by name."""

    step: int
    scalars: Mapping[str, float]

    def to_json(self) -> str:
        """Return the line of metrics.jsonl without its newline. JSON has no NaN: it becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.scalars.items()}
        return json.dumps({"step": self.step, **finite}, ensure_ascii=False, allow_nan=False)

    def finite(self) -> Iterator[tuple[str, float]]:
        """Return the scalars that are finite, for TensorBoard and wandb."""
        return ((name, value) for name, value in self.scalars.items() if math.isfinite(value))


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Return an iterator over the records in a run's `metrics.jsonl`: `step` and the scalars by name.

    path: the file, or the folder of the run. Lines that are no record are skipped.
    """
    file = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file. Name the metrics.jsonl of a run: runs/NAME/metrics.jsonl.")
    return metrics_so_far(file)


def metrics_so_far(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Return the records of a run that may not have taken a step yet, or those at the end of the file."""
    return records_in(path, parse_line, last_bytes)


def records_in(
    path: Path, parse: Callable[[bytes], dict[str, Any] | None], last_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records of a file with one a line, except lines of which `parse` makes none.

    last_bytes: The end of a long file that is read; by default all of it.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        yield from (record for line in file if (record := parse(line)) is not None)


def last_value(records: Iterable[dict[str, Any]], name: str) -> float | None:
    """Return the last value of a scalar; None if it was never measured, or was not finite the last time."""
    values = [record[name] for record in records if name in record]
    return values[-1] if values else None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl, or None if it is cut short or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return _named(record) if OLD_NAMES.keys() & record.keys() else record


def _named(old: dict[str, Any]) -> dict[str, Any]:
    """Return a nested record of an older version as named scalars."""
    record: dict[str, Any] = {}
    for key, value in old.items():
        name = OLD_NAMES.get(key, key)
        if key == "router_load":
            for layer, load in value.items():
                experts = f"experts/{layer.removeprefix('layer_')}"
                record[f"{experts}/max_over_mean"] = load["max_over_mean"]
                record |= {f"{experts}/share/{expert}": share for expert, share in enumerate(load["shares"])}
        elif isinstance(value, dict):
            record |= {f"{name}/{inner}": number for inner, number in value.items()}
        else:
            record[name] = value
    return record
