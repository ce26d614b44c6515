"""Results of a study's runs: losses, parameters, FLOPs, balance, speed and memory, with confidence over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_blackmamba.formats.step_records import last_value, metrics_so_far
from megatron_blackmamba.plan import flops, parameters
from megatron_blackmamba.study.config import StudyError
from megatron_blackmamba.study.runs import Cell

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5% points of Student's t by number of values."""
NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Result:
    """One finished run."""

    name: str
    kind: str
    group: str
    size: str
    seed: int
    learning_rate: float
    parameters: int
    active: int
    """Parameters that a token passes through."""
    tokens: int
    flops: float
    loss: float
    """Training loss, the mean over the last 20 steps."""
    validation: float
    """Validation loss with the router as in inference."""
    balanced: float | None
    """Validation loss with the experts balanced as in training."""
    tokens_per_second: float
    memory_bytes: int
    busiest: dict[str, float]
    """By layer: the busiest expert's tokens over the mean, at the end."""
    curve: list[tuple[int, float, float]]
    """Tokens, FLOPs and validation loss at every validation."""
    bits_per_byte: float | None = None
    """The validation loss as bits per byte of text; None if it was not recorded or not finite."""
    fastest: float = 0.0
    """Tokens per second of the fastest step, which stands for an idle machine."""


def collect(cell: Cell) -> Result:
    """Return the result of a finished run."""
    records = list(metrics_so_far(cell.folder.metrics))
    last, config = records[-1], cell.config
    counted = parameters.count(config)
    per_token = flops.training(config.model, config.data.sequence_length)
    validated = [record for record in records if "validation/loss" in record]  # None where it was not finite
    final = last_value(records, "validation/loss")
    recent = [record["loss"] for record in records[-20:] if record.get("loss") is not None]
    return Result(
        name=cell.name,
        kind=cell.kind,
        group=cell.group,
        size=cell.size,
        seed=cell.seed,
        learning_rate=config.optimizer.learning_rate,
        parameters=counted.total,
        active=counted.forward,
        tokens=last["consumed_tokens"],
        flops=float(per_token * last["consumed_tokens"]),
        loss=statistics.fmean(recent) if recent else math.nan,
        validation=math.nan if final is None else final,
        balanced=validated[-1].get("validation/loss_balanced") if validated else None,
        tokens_per_second=statistics.median(record["speed/tokens_per_second"] for record in records),
        memory_bytes=int(max(record.get("speed/memory_bytes", 0) for record in records)),
        busiest=busiest(records),
        curve=[
            (record["consumed_tokens"], float(per_token * record["consumed_tokens"]), record["validation/loss"])
            for record in validated
            if record["validation/loss"] is not None
        ],
        bits_per_byte=last_value(records, "validation/bits_per_byte"),
        fastest=max(record["speed/tokens_per_second"] for record in records),
    )


def busiest(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return by layer the busiest expert's tokens over the mean, as it was last measured in training."""
    for record in reversed(records):
        found = {name.split("/")[1]: value for name, value in record.items() if name.endswith("/max_over_mean")}
        if found:
            return found
    return {}


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95% confidence interval of the mean by Student's t; None from one value."""
    if len(values) < 2:
        return None
    return _t_95(len(values)) * statistics.stdev(values) / math.sqrt(len(values))


def mean_of(values: Sequence[float], sign: str = "") -> str:
    """Return the mean for people, with its 95% confidence interval if there is one; `sign` is + or nothing."""
    half = half_interval(values)
    return f"{statistics.fmean(values):{sign}.3f}" + ("" if half is None else f" ± {half:.3f}")


def _t_95(values: int) -> float:
    """Return the 97.5% point for a number of values; above the table, by the expansion around the normal one."""
    z, freedom = NORMAL_95, values - 1
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return T_95.get(values) or z + first / freedom + second / freedom**2 + third / freedom**3


@dataclass(frozen=True)
class Group:
    """The runs of a variant or ablation at one size."""

    kind: str
    group: str
    size: str
    results: tuple[Result, ...]

    def mean(self, field: str) -> float:
        """Return the mean of a field over the seeds."""
        return statistics.fmean(getattr(result, field) for result in self.results)

    def interval(self, field: str) -> float | None:
        """Return half of the 95% confidence interval of that mean; None from one seed."""
        return half_interval([getattr(result, field) for result in self.results])

    def differences(self, other: "Group", field: str) -> list[float]:
        """Return this group's value minus the other group's, for each seed that both have."""
        others = {result.seed: getattr(result, field) for result in other.results}
        return [getattr(result, field) - others[result.seed] for result in self.results if result.seed in others]

    @property
    def has_bits(self) -> bool:
        """Return whether the bits per byte of every run are known."""
        return all(result.bits_per_byte is not None for result in self.results)

    @property
    def has_balanced(self) -> bool:
        """Return whether every run has experts and was also validated with balanced ones."""
        return all(result.balanced is not None and result.busiest for result in self.results)


def grouped(results: Sequence[Result], kind: str) -> list[Group]:
    """Return the groups of one kind in the order of the study."""
    keys = dict.fromkeys((result.group, result.size) for result in results if result.kind == kind)
    return [
        Group(kind, group, size, tuple(r for r in results if (r.kind, r.group, r.size) == (kind, group, size)))
        for group, size in sorted(keys, key=lambda key: list(dict.fromkeys(k[1] for k in keys)).index(key[1]))
    ]


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the results as JSON values."""
    return [asdict(result) for result in results]


def read_results(path: Path) -> list[Result]:
    """Return the results of a file that a study of whole runs wrote."""
    try:
        return TypeAdapter(list[Result]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StudyError(f"{path} cannot be read as the results of a study: {str(error).splitlines()[0]}") from None
