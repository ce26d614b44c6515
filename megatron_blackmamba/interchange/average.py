"""The average of several checkpoints of one model, weight by weight, as a model to start from, score or export."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange.canonical import Canonical, Entry, InterchangeError, Past, tokenizer_of
from megatron_blackmamba.interchange.hf import function_of
from megatron_blackmamba.interchange.open import existing_folder


def average(models: Sequence[Canonical], weights: Sequence[float] | None = None) -> Canonical:
    """Return the weighted mean of models that compute the same function of their weights, in fp32.

    Sums are in float64, and one tensor of each model is in memory at a time. Weights are divided by their sum.
    """
    if len(models) < 2:
        raise InterchangeError("an average needs at least two checkpoints")
    shares = _shares(weights or [1.0] * len(models), len(models))
    first, *others = models
    for other in others:
        mine, its = function_of(first.config), function_of(other.config)
        changed = {key for key in mine | its if mine.get(key) != its.get(key)}
        if changed or _shapes(other) != _shapes(first):
            names = ", ".join(f"model.{key}" for key in sorted(changed)) or "parameters"
            raise InterchangeError(f"{other.source}: has other {names} than {first.source}: an average means nothing")
        if _tokenizer(first) != _tokenizer(other):
            raise InterchangeError(f"{other.source}: has another tokenizer than {first.source}: their token ids differ")
    entries = {
        name: Entry(entry.shape, torch.float32, partial(_mean, [model.entries[name] for model in models], shares))
        for name, entry in first.entries.items()
    }
    told = ", ".join(f"{model.source} × {share:.3g}" for model, share in zip(models, shares, strict=True))
    last = models[-1]

    def past() -> Past:
        return Past({**last.past().facts, "Average of": told})

    return replace(last, entries=entries, source=f"the average of {len(models)} checkpoints", past=past)


def newest(run: Path, count: int) -> list[Path]:
    """Return the newest checkpoints of a run, oldest first; refuse a run that has fewer."""
    run = existing_folder(run)
    found = sorted(path for path in RunFolder(run).checkpoints.glob("step_*") if path.suffix == "")
    if len(found) < count:
        kept = ", ".join(path.name for path in found) or "none"
        raise InterchangeError(
            f"{run}: has {len(found)} checkpoints ({kept}), not {count}. checkpoint.keep_last says how many a run keeps"
        )
    return found[-count:]


def _shapes(model: Canonical) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in model.entries.items()}


def _shares(weights: Sequence[float], count: int) -> list[float]:
    if len(weights) != count:
        raise InterchangeError(f"{len(weights)} weights for {count} checkpoints: give one for each")
    if min(weights) < 0 or not sum(weights) > 0:
        given = ", ".join(map(str, weights))
        raise InterchangeError(f"weights {given}: none may be negative, and one must be above 0")
    return [weight / sum(weights) for weight in weights]


def _mean(entries: Sequence[Entry], shares: Sequence[float]) -> Tensor:
    total = torch.zeros(entries[0].shape, dtype=torch.float64)
    for entry, share in zip(entries, shares, strict=True):
        total.add_(entry.load().double(), alpha=share)
    return total.float()


def _tokenizer(model: Canonical) -> tuple[str, int] | None:
    tokenizer = tokenizer_of(model)
    return None if tokenizer is None else (tokenizer.sha256, tokenizer.eod_id)
