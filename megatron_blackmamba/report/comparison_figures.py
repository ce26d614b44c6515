"""Runs side by side: what differs in their configs, and losses, speed and scores at equal tokens and equal FLOPs."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.evaluations import Evaluation, read_run
from megatron_blackmamba.plan import flops
from megatron_blackmamba.registry import UnknownKind
from megatron_blackmamba.report.history import History, ReportError, Series, read_history, weighted_mean

RESAMPLES = 10_000
WINDOW, FEWEST_STEPS, LARGEST_WINDOW = 0.02, 20, 0.1
"""Part of a run over which its training loss is averaged: more of a short run, for 20 steps, but at most 10%."""
AXES = {"tokens": "tokens", "flops": "training FLOPs", "step": "step", "hours": "hours"}
NEAR = 0.01
"""Part of a place by which a validation may lie beside it: equal FLOPs are equal up to a batch."""
LONG_NAME = 20
PLACES = 200
"""Places at which a page knows all axes of a run; between them it interpolates."""
NOT_COMPARED = {"name", "folder"}


@dataclass(frozen=True)
class Compared:
    """A run as a comparison sees it."""

    history: History
    flops_per_token: float
    """NaN if no module here defines a kind of its layers."""
    scores: Evaluation | None
    """Of its last evaluated checkpoint."""
    scored: Sequence[Evaluation]
    """Of all its evaluated checkpoints, by step."""
    validation: Series | None
    """Validation loss; the mean over the sources is weighted alike in all runs."""
    bits_per_byte: Series | None
    """The same in bits per byte of text."""

    @property
    def flops_before(self) -> float:
        """Return what the tokens of a trunk cost beyond as many here: those of longer sequences may cost more."""
        if (before := self.history.before) is None:
            return 0.0
        trunk = compared(before)
        return trunk.flops_before + before.last["consumed_tokens"] * (trunk.flops_per_token - self.flops_per_token)

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def tokens(self) -> Series:
        """Return the consumed tokens by step."""
        return self.history.scalars["consumed_tokens"]

    @property
    def loss(self) -> Series:
        return self.history.scalars["loss"]

    def along(self, axis: str, steps: np.ndarray) -> np.ndarray:
        """Return where steps lie on an axis: step, tokens, flops or hours."""
        if axis == "step":
            return steps.astype(float)
        if axis == "hours":
            seconds = self.history.scalars["speed/step_seconds"]
            hours = np.cumsum(np.nan_to_num(seconds.value)) / 3600
            return self.history.hours_before + np.interp(steps, seconds.step, hours)
        tokens = np.interp(steps, self.tokens.step, self.tokens.value)
        return tokens * self.flops_per_token + self.flops_before if axis == "flops" else tokens

    def axes(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return where some of its steps lie on each axis that is known, by what a page calls it."""
        steps = self.tokens.step[np.unique(np.linspace(0, len(self.tokens.step) - 1, PLACES).astype(int))]
        found = {AXES[name]: self.along(name, steps) for name in names}
        return {name: places for name, places in found.items() if np.isfinite(places).all()}

    def end(self, axis: str) -> float:
        """Return the place of the last step on an axis."""
        return float(self.along(axis, self.tokens.step[-1:])[0])

    def averaged_loss(self, axis: str, place: float) -> tuple[float, int]:
        """Return the training loss up to a place on an axis, and the number of last steps it is averaged over."""
        near = self.last_losses(axis, place)
        near = near[np.isfinite(near)]
        if not len(near):
            return float(np.interp(place, *self._whole_way(axis, "loss"))), 1
        return float(near.mean()), len(near)

    def validated_at(self, axis: str, place: float, bits: bool = False) -> bool:
        """Return whether a validation loss, or its bits per byte, was measured at a place on an axis."""
        where, _ = self._whole_way(axis, "bits_per_byte" if bits else "validation")
        return bool(np.isclose(where, place, rtol=1e-9).any())

    def validated_near(self, axis: str, place: float, bits: bool = False) -> float:
        """Return a place on an axis, or that of the first or last validation if it is beyond it by less than 1%."""
        where, _ = self._whole_way(axis, "bits_per_byte" if bits else "validation")
        near = float(np.clip(place, where[0], where[-1])) if len(where) else place
        return near if abs(near - place) < NEAR * place else place

    def last_losses(self, axis: str, place: float) -> np.ndarray:
        """Return the losses of the last steps up to a place on an axis, over which a training loss is averaged."""
        where, losses = self._whole_way(axis, "loss")
        before = int((where <= place).sum())
        return losses[max(0, before - last_steps(before)) : before]

    def validation_at(self, axis: str, place: float, bits: bool = False) -> float:
        """Return the validation loss, or its bits per byte, at a place; interpolated; NaN beyond what was measured."""
        where, losses = self._whole_way(axis, "bits_per_byte" if bits else "validation")
        if not len(where):
            return float("nan")
        return float(np.interp(place, where, losses, left=np.nan, right=np.nan))

    def _whole_way(self, axis: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the places and values of a series from the first step of the first trunk on."""
        trunks = [compared(trunk, (), trunk.validation_loss, trunk.bits_per_byte) for trunk in self.history.trunks]
        runs = [*reversed(trunks), self]
        found = [(run, series) for run in runs if (series := getattr(run, name)) is not None]
        places = [run.along(axis, series.step) for run, series in found]
        return np.concatenate([[], *places]), np.concatenate([[], *(series.value for _, series in found)])


@dataclass(frozen=True)
class Difference:
    """One score of two models on the same questions."""

    task: str
    metric: str
    first: float
    second: float
    low: float
    high: float
    """95% interval of second minus first, bootstrapped over the questions."""
    p: float
    """Part of the resamples in which the difference has the other sign, twice."""

    @property
    def clear(self) -> bool:
        return self.low > 0 or self.high < 0


def read_all(paths: Sequence[Path]) -> list[Compared]:
    """Read the runs to compare."""
    if len(paths) < 2:
        raise ReportError("name at least two runs to compare")
    found = []
    histories = [read_history(path) for path in paths]
    names = short_names([history.name for history in histories])
    for path, name, history, (validation, bits) in zip(
        paths, names, histories, _weighted_alike(histories), strict=True
    ):
        scores, history = read_run(path), dataclasses.replace(history, name=name)
        found.append(compared(history, scores, validation, bits))
    return found


def last_steps(steps: int) -> int:
    """Return over how many of the last steps a training loss is averaged."""
    return max(1, round(max(WINDOW * steps, min(FEWEST_STEPS, LARGEST_WINDOW * steps))))


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without what all have at their beginnings and ends, if one of them is long."""
    parts = [re.split(r"(?<=[-_])", name) for name in names]
    if max(map(len, names)) <= LONG_NAME or len(set(names)) < len(names):
        return [*names]
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({each[end] for each in parts}) == 1:
            parts = [each[1:] if end == 0 else each[:-1] for each in parts]
    return ["".join(each).strip("-_") for each in parts]


def compared(
    history: History,
    scores: Sequence[Evaluation] = (),
    validation: Series | None = None,
    bits_per_byte: Series | None = None,
) -> Compared:
    config = RunConfig.model_validate(history.config)
    try:
        per_token = float(flops.training(config.model, config.data.sequence_length))
    except UnknownKind:
        per_token = math.nan
    return Compared(history, per_token, scores[-1] if scores else None, scores, validation, bits_per_byte)


def trunks(runs: Sequence[Compared]) -> list[Compared]:
    """Return the trunks that these runs branch from, each once and as far as one of them follows it.

    One that is itself among the runs is left out: its own curve shows it.
    """
    known = {run.history.folder.root.resolve() for run in runs}
    longest: dict[Path, History] = {}
    for history in (trunk for run in runs for trunk in run.history.trunks):
        root = history.folder.root.resolve()
        if root not in known and (root not in longest or longest[root].steps < history.steps):
            longest[root] = history
    return [compared(each, (), each.validation_loss, each.bits_per_byte) for each in longest.values()]


def one_mixture(histories: Sequence[History]) -> bool:
    """Return whether all runs weigh the validation losses of the same sources in the same way."""
    found = [_weighing(history) for history in histories if history.of("validation/loss/*")]
    return all(one == found[0] for one in found)


def shared_sources(histories: Sequence[History]) -> list[str]:
    """Return the sources that all runs with validation losses were validated on."""
    found = [of_run for history in histories if (of_run := history.of("validation/loss/*"))]
    return [name for name in found[0] if all(name in other for other in found)] if found else []


def _weighing(history: History) -> tuple[Any, ...]:
    """Return what decides the weights of the sources; with several phases, the length of the run does too."""
    phases = history.plan.get("phases") or []
    tokens = history.config["training"]["tokens"] if len(phases) > 1 else None
    return phases, tokens, set(history.of("validation/loss/*"))


def _weighted_alike(histories: Sequence[History]) -> list[tuple[Series | None, Series | None]]:
    """Return each run's validation loss and bits per byte: as recorded, or of the sources that all runs have.

    These are weighted by the first run's mixture: the losses by its tokens, bits per byte as if by its bytes.
    """
    shared, shares = shared_sources(histories), histories[0].planned
    if one_mixture(histories) or not shared:
        return [(history.validation_loss, history.bits_per_byte) for history in histories]

    def mean(history: History, metric: str) -> Series | None:
        found = history.of(metric)
        return weighted_mean({name: found[name] for name in shared}, shares) if found.keys() >= {*shared} else None

    return [(mean(each, "validation/loss/*"), mean(each, "validation/bits_per_byte/*")) for each in histories]


def differences(runs: Sequence[Compared]) -> list[tuple[str, list[Any]]]:
    """Return the keys of the configs that are not the same in all runs, with their values."""
    flat = [dict(_flat(run.history.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key) for config in flat]) for key in keys if key not in NOT_COMPARED]
    rows.append(
        ("tokenizer (of different ones compare bits per byte, not losses)", [_tokenizer(run.history) for run in runs])
    )
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def several_tokenizers(runs: Sequence[Compared]) -> bool:
    """Return whether runs have different tokenizers, so that only their bits per byte compare."""
    return len({_tokenizer(run.history) for run in runs}) > 1


def _tokenizer(history: History) -> str | None:
    tokenizer = history.plan.get("tokenizer")
    return f"{tokenizer['name']} {tokenizer['sha256'][:12]}" if tokenizer else None


def common_end(runs: Sequence[Compared], axis: str) -> float:
    """Return the last place on an axis that every run has reached."""
    return float(np.min([run.end(axis) for run in runs]))  # nan if one has none


def paired(first: Evaluation, second: Evaluation, seed: int = 0) -> list[Difference]:
    """Compare the scores that two models have on the same questions."""
    found = []
    mine, theirs = first.by_task(), second.by_task()
    for task in mine:
        if task not in theirs or not mine[task].key.asks(theirs[task].key):
            continue
        for metric in mine[task].answers.keys() & theirs[task].answers.keys():
            a, b = (np.asarray(each[task].answers[metric]) for each in (mine, theirs))
            low, high, p = bootstrap(b - a, seed)
            found.append(Difference(task, metric, float(a.mean()), float(b.mean()), low, high, p))
    return sorted(found, key=lambda one: (list(mine).index(one.task), one.metric))


def bootstrap(differences: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Return the 95% interval of the mean of paired differences, and the two-sided p-value of no difference."""
    random = np.random.default_rng(seed)
    values, counts = np.unique(differences, return_counts=True)
    if len(values) <= 100:  # right or wrong: a resample of questions is a draw of how many have each difference
        drawn = random.multinomial(counts.sum(), counts / counts.sum(), RESAMPLES)
        means = drawn @ values / counts.sum()
    else:
        picks = (random.integers(0, len(differences), len(differences)) for _ in range(RESAMPLES))
        means = np.array([differences[pick].mean() for pick in picks])
    low, high = np.quantile(means, (0.025, 0.975))
    p = 2 * min((means <= 0).mean(), (means >= 0).mean())
    return float(low), float(high), float(min(1.0, p))


def _flat(content: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{before}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found
