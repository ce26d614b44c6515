"""The points of a study that a number of core-hours pays for, in the order of the study."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_blackmamba.study.points import Point
from megatron_blackmamba.study.runs import Cell

ASSUMED = 4e10
"""FLOPs per second of one core, before a run has been measured: tiny models in fp32 on a Xeon of 2023."""


@dataclass(frozen=True)
class Costed:
    """A point that is not finished yet, and what it costs on an idle core."""

    cell: Cell
    hours: float


def costs(cells: Sequence[Cell], points: Sequence[Point]) -> list[Costed]:
    """Return what each unfinished point costs beyond those before it: a trunk is paid for once."""
    known: dict[tuple[str, str], list[float]] = {}
    for point in points:
        if point.step_seconds:
            known.setdefault((point.variant, point.size), []).append(point.step_seconds)
    seconds = {key: statistics.median(values) for key, values in known.items()}
    return [Costed(cell, steps * _step(cell, seconds) / 3600) for cell, steps in own_steps(cells) if not cell.done]


def own_steps(cells: Sequence[Cell]) -> Iterator[tuple[Cell, int]]:
    """Yield the steps that each cell takes beyond those before it."""
    reached: dict[str, int] = {}
    for cell in cells:
        trunk = max(0, cell.leaves - reached.get(cell.chain, 0))
        reached[cell.chain] = max(cell.leaves, reached.get(cell.chain, 0))
        yield cell, trunk + cell.config.steps - cell.leaves


def _step(cell: Cell, seconds: Mapping[tuple[str, str], float]) -> float:
    return seconds.get((cell.group, cell.size)) or cell.step_flops / ASSUMED


def afforded(found: Sequence[Costed], hours: float) -> list[Cell]:
    """Return the first points that fit into a number of core-hours together."""
    cells = []
    for each in found:
        hours -= each.hours
        if hours < 0:
            break
        cells.append(each.cell)
    return cells


def described(found: Sequence[Costed], hours: float) -> list[str]:
    """Return lines about what the core-hours pay for, by size and seed."""
    some = found[: len(afforded(found, hours))]
    total = sum(each.hours for each in found)
    groups: dict[str, list[Costed]] = {}
    for each in some:
        groups.setdefault(f"size {each.cell.size}, seed {each.cell.seed}", []).append(each)
    lines = [f"{len(some)} of {len(found)} points cost up to {hours:g} core-hours; all cost {total:.1f}"]
    for name, members in groups.items():
        budgets = sorted({each.cell.budget for each in members})
        spent = sum(each.hours for each in members)
        lines.append(f"{name}: {len(members)} points, budgets {budgets[0]:,} to {budgets[-1]:,}, {spent:.2f} hours")
    return lines
