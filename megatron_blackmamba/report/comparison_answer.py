"""The answer of a comparison in sentences: which run is ahead, by how much and how surely."""

import math
from collections.abc import Sequence

import numpy as np

from megatron_blackmamba.report.charts import short
from megatron_blackmamba.report.comparison_figures import NEAR, Compared, common_end, several_tokenizers
from megatron_blackmamba.report.confidence import half_interval

SEEDS = "Another seed may change it by more: train both with several, or run a study."


def answer(runs: Sequence[Compared]) -> list[str]:
    """Return a sentence for each run behind the best one, at equal tokens, and at last what they do not say."""
    bits = several_tokenizers(runs)
    losses = {axis: _losses(runs, axis, bits) for axis in ("tokens", "flops")}
    what, known = losses["tokens"]
    if not what:
        return ["No loss that all runs have can be compared: validate them on the same text."]
    best, *others = sorted(range(len(runs)), key=lambda i: known[i])
    said = [_sentence(runs, best, other, what, losses) for other in others]
    return [*said, SEEDS]


def _losses(runs: Sequence[Compared], axis: str, bits: bool) -> tuple[str, list[float]]:
    """Return what is compared, and each run's value where the shortest ends; nothing where a run has none.

    The FLOPs of layers and routers from outside are unknown without their module.
    """
    end = common_end(runs, axis)
    if not math.isfinite(end):
        return "", []
    validated = [run.validation_at(axis, run.validated_near(axis, end, bits), bits) for run in runs]
    if all(map(math.isfinite, validated)):
        return "bits per byte" if bits else "validation loss", validated
    averaged = [run.averaged_loss(axis, end)[0] for run in runs]
    return ("", []) if bits or not all(map(math.isfinite, averaged)) else ("training loss", averaged)


def _sentence(
    runs: Sequence[Compared], best: int, other: int, what: str, losses: dict[str, tuple[str, list[float]]]
) -> str:
    parts, alike = [], []
    for axis, (of, values) in losses.items():
        if values:
            end, by = common_end(runs, axis), values[other] - values[best]
            place = f"{end:.2e} FLOPs" if axis == "flops" else f"{short(end)} tokens"
            loss = "" if of == what else f" in {of}"
            alike += [by] if of == what else []
            early = [runs[i].name for i in (best, other) if runs[i].end(axis) > end * (1 + NEAR)]
            still = f" (where {' and '.join(early)} had not ended)" if early else ""
            parts.append(f"{'' if by >= 0 else 'behind '}by {abs(by):.4f}{loss} at {place}{still}")
    difference, half, steps = _in_training(runs[best], runs[other], common_end(runs, "tokens"))
    verdict = "is ahead of" if min(alike) > 0 and half is not None and difference > half else "is not clearly ahead of"
    interval = "" if half is None else f" ± {half:.4f} (95% interval)"
    noise = f"; in the last {steps} training steps by {difference:.4f}{interval}" if steps else ""
    return f"{runs[best].name} {verdict} {runs[other].name} in {what}, {' and '.join(parts)}{noise}."


def _in_training(one: Compared, other: Compared, tokens: float) -> tuple[float, float | None, int]:
    """Return how far the other's training loss is above, half its 95% interval, and over how many steps.

    Steps of the same batches are compared one by one, which leaves out what a batch does to both.
    """
    first, second = (run.last_losses("tokens", tokens) for run in (one, other))
    if _same_batches(one, other) and len(first) == len(second):
        each = second - first
        each = each[np.isfinite(each)]
        return (float(each.mean()), half_interval(each), len(each)) if len(each) else (math.nan, None, 0)
    first, second = (some[np.isfinite(some)] for some in (first, second))
    if not len(first) or not len(second):
        return math.nan, None, 0
    halves = [half for some in (first, second) if (half := half_interval(some)) is not None]
    half = math.hypot(*halves) if len(halves) == 2 else None
    return float(second.mean() - first.mean()), half, min(len(first), len(second))


def _same_batches(one: Compared, other: Compared) -> bool:
    mine, theirs = one.history.config, other.history.config
    keys = ("seed", "global_batch", "batch_ramp")
    return mine["data"] == theirs["data"] and all(mine["training"].get(k) == theirs["training"].get(k) for k in keys)
