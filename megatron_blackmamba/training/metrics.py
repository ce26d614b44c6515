"""What one step is to those who watch: one record, one line of metrics.jsonl, and how to read it back. No torch."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ALWAYS = frozenset({"loss", "grad_norm"})  # null when not finite, never absent


@dataclass(frozen=True)
class RouterLoad:
    """How evenly one layer's experts were used."""

    max_over_mean: float
    """1.0 is perfect balance; the number of experts is collapse."""
    shares: list[float]
    """Part of the tokens each expert got."""


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl; what is None is left out."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens_per_second: float
    step_seconds: float
    skipped: bool
    """The weights were left as they are."""
    source_loss: dict[str, float]
    source_samples: dict[str, int]
    """Samples read of every source since the run began."""
    memory_bytes: int
    """Largest so far on this rank: of the GPU where there is one, of the process otherwise."""
    router_load: dict[str, RouterLoad] | None = None
    """By layer; every training.router_every steps."""
    validation_loss: dict[str, float] | None = None
    """By source; every training.evaluate_every steps."""
    slowest_rank: int | None = None
    """The rank that took the most time for its own work, if there are several."""
    slowest_over_median: float | None = None
    """Its time over the median of the other ranks' times."""
    mfu: float | None = None
    """Part of the GPU's peak that the model's own arithmetic used."""

    def to_json(self) -> str:
        record = {key: value for key, value in asdict(self).items() if value is not None or key in ALWAYS}
        return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Named numbers, for TensorBoard and wandb."""
        for name in (
            "loss",
            "grad_norm",
            "learning_rate",
            "tokens_per_second",
            "step_seconds",
            "memory_bytes",
            "mfu",
            "slowest_over_median",
        ):
            value = getattr(self, name)
            if value is not None and math.isfinite(value):
                yield name, value
        for name in ("source_loss", "validation_loss"):
            for source, loss in (getattr(self, name) or {}).items():
                yield f"{name}/{source}", loss
        for layer, load in (self.router_load or {}).items():
            yield f"router_max_over_mean/{layer}", load.max_over_mean
            for expert, share in enumerate(load.shares):
                yield f"router_share/{layer}/expert_{expert}", share


def router_load(counts: Sequence[float]) -> RouterLoad:
    """From the tokens each expert of a layer got."""
    total = sum(counts) or 1
    return RouterLoad(max(counts) * len(counts) / total, [round(count / total, 6) for count in counts])


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of a run in order. Lines that are no record of a step are skipped."""
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            record = parse_line(line)
            if record is not None:
                yield record


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl, or None if it is cut short or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
