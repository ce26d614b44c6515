"""The runs of a study, by name: first those that choose the learning rates, then the runs themselves."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import last_value, metrics_so_far
from megatron_blackmamba.plan import flops
from megatron_blackmamba.study.config import BRANCH, RATE, Keys, StudyConfig, as_overrides
from megatron_blackmamba.study.corpus import Corpus


def folder_of(config: RunConfig) -> RunFolder:
    """Return the folder of a run."""
    return RunFolder(Path(config.folder) / config.name)


@dataclass(frozen=True)
class Cell:
    """One run of a study, as the page groups it."""

    name: str
    kind: str
    """tuning, run or ablation."""
    group: str
    """The variant, or the ablation."""
    size: str
    seed: int
    config: RunConfig
    trunk: RunConfig | None = None
    """The run that this one branches from, as far as it needs it."""
    budget: int = 0
    """Tokens of the study's first variant for the same FLOPs."""
    changed: tuple[tuple[str, Any], ...] = ()
    """Keys of a grid and their values."""
    waits: bool = False
    """Whether its learning rate is not chosen yet."""

    @property
    def chain(self) -> str:
        """Return what runs in one process share: their trunk, if they have one."""
        return self.name if self.trunk is None else self.trunk.name

    @property
    def leaves(self) -> int:
        """Return the step at which it leaves its trunk."""
        return (self.trunk.training.stop_after_steps or 0) if self.trunk else 0

    @property
    def trunk_metrics(self) -> Path:
        """Return the file with the steps of its trunk, which are its own first ones."""
        return self.folder.metrics if self.trunk is None else folder_of(self.trunk).metrics

    @property
    def step_flops(self) -> int:
        """Return the training FLOPs of one step."""
        return flops.training(self.config.model, self.config.data.sequence_length) * self.config.tokens_per_step

    @property
    def folder(self) -> RunFolder:
        """Return the folder of the run."""
        return folder_of(self.config)

    @property
    def done(self) -> bool:
        """Return whether the run has consumed its tokens."""
        return self.folder.done.exists()


@dataclass(frozen=True, eq=False)
class Study:
    """A study in its folder."""

    name: str
    config: StudyConfig
    folder: Path
    best: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The learning rates of variants and sizes for series with `best_rate`, as far as they are chosen."""

    @property
    def corpus(self) -> Corpus:
        """Return the text of the study."""
        return Corpus(self.folder / "corpus", self.config.corpus)

    def tuning(self) -> list[Cell]:
        """Return the runs that choose learning rates; none if there is only one to choose from."""
        tuning = self.config.tuning
        if len(tuning.learning_rates) == 1:
            return []
        return [
            self._cell("tuning", variant, tuning.size, tuning.seed, rate, tuning.fraction)
            for variant in self.config.variants
            for rate in tuning.learning_rates
        ]

    def learning_rates(self) -> dict[str, float] | None:
        """Return the learning rate of each variant with the lowest validation loss; None before all have run."""
        if len(self.config.tuning.learning_rates) == 1:
            return dict.fromkeys(self.config.variants, self.config.tuning.learning_rates[0])
        chosen = {}
        for variant in self.config.variants:
            cells = [cell for cell in self.tuning() if cell.group == variant]
            losses = {cell.config.optimizer.learning_rate: final_loss(cell) for cell in cells if cell.done}
            if len(losses) < len(cells):
                return None
            chosen[variant] = min(losses, key=lambda rate: losses[rate])
        return chosen

    def cells(self) -> list[Cell]:
        """Return the runs that are known so far, those that choose learning rates too unless all runs are branches."""
        rates = self.learning_rates()
        return [*([] if self.config.has_branches else self.tuning()), *(self.runs(rates) if rates else ())]

    @property
    def planned(self) -> int:
        """Return how many runs there will be, as far as that is known."""
        if self.config.has_branches:
            return len(self.cells())
        return len(self.tuning()) + len(self.runs(dict.fromkeys(self.config.variants, 1e-3)))

    def runs(self, rates: dict[str, float]) -> list[Cell]:
        """Return the runs and ablations, whole comparisons first: a study that is cut short compares something."""
        if self.config.has_branches:
            return [*self._points(tuple(rates.items()))]
        whole = [
            self._cell("run", variant, size, seed, rates[variant])
            for seed in self.config.seeds
            for size in self.config.tokens
            for variant in self.config.variants
        ]
        return [*whole, *self._ablations(rates)]

    def _ablations(self, rates: dict[str, float]) -> Iterator[Cell]:
        for name, ablation in self.config.ablations.items():
            for seed in ablation.seeds:
                yield self._cell("ablation", ablation.of, ablation.size, seed, rates[ablation.of], ablation=name)

    @functools.cache  # noqa: B019 - a process has one study
    def _points(self, rates: tuple[tuple[str, float], ...]) -> tuple[Cell, ...]:
        """Return the branches of all series, without repetition."""
        known: dict[tuple, Cell] = {}
        for series in self.config.series:
            grid = [[(key, value) for value in values] for key, values in series.grid.items()]
            order = itertools.product(
                series.sizes, series.seeds, [*itertools.product(*grid)], series.variants or self.config.variants
            )
            for size, seed, changed, variant in order:
                if size not in self.config.variants[variant]:
                    continue
                rate, best = dict(rates)[variant], self.best.get((variant, size))
                if series.best_rate and best not in (None, rate):
                    changed = (*changed, (RATE, best))
                for budget in self.config.tokens[size][: series.budgets]:
                    if (point := (variant, size, seed, changed, budget)) not in known:
                        cell = self._branch(*point, rate)
                        known[point] = replace(cell, waits=series.best_rate and best is None)
        return tuple(known.values())

    def _branch(
        self, variant: str, size: str, seed: int, changed: tuple[tuple[str, Any], ...], budget: int, rate: float
    ) -> Cell:
        """Return a branch, and its trunk up to the place where the branch leaves it."""
        whole = {key: value for key, value in changed if not key.startswith(BRANCH)}
        after = {key.removeprefix(BRANCH): value for key, value in changed if key.startswith(BRANCH)}
        stem = f"{variant}-{size}-seed{seed}" + self._named(whole)
        rate = whole.get(RATE, rate)
        keys = {**self._keys(f"trunk-{stem}", seed, rate), **whole}
        tokens, most = (self._tokens(variant, size, each, whole) for each in (budget, self.config.tokens[size][-1]))
        _, step = self._cost(variant, size, tuple(whole.items()))
        leaves = round((1 - self.config.decay) * tokens / step)
        stop = {"training.stop_after_steps": leaves, "training.evaluate_every": 0, "resume.allow": "[training.tokens]"}
        trunk = self._compose(variant, size, {"optimizer.decay": "constant"}, {**keys, **stop}, most)
        decay = {
            "name": f"{stem}{self._named(after, 'branch_')}-{budget}",
            "start.branch": f"{Path(trunk.folder) / trunk.name}@{leaves}",
            "optimizer.decay": "wsd",
            "optimizer.decay_tokens": tokens - leaves * step,
        }
        config = self._compose(variant, size, {}, {**keys, **decay, **after}, tokens)
        return Cell(config.name, "run", variant, size, seed, config, trunk, budget, changed)

    def _named(self, changed: Keys, prefix: str = "") -> str:
        """Return what changed keys add to the name of a run."""
        return "".join(f"-{prefix}{self._labels[key]}_{value}" for key, value in changed.items())

    @functools.cached_property
    def _labels(self) -> dict[str, str]:
        """Return what stands for each key of a grid in names: its last part, if no other key ends so."""
        last = {
            key: key.rpartition(".")[2]
            for key in (key.removeprefix(BRANCH) for series in self.config.series for key in series.grid)
        }
        number = Counter(last.values())
        return {key: name if number[name] == 1 else key for key, name in last.items()}

    def _keys(self, name: str, seed: int, rate: float) -> dict[str, Any]:
        return {
            "name": name,
            "folder": str((self.folder / "runs").resolve()),
            "data.kind": "mixture",
            "data.mixture": str(self.corpus.mixture.resolve()),
            "training.seed": seed,
            "data.seed": seed,
            RATE: rate,
            "optimizer.min_learning_rate": rate / 20,
        }

    def _cell(
        self,
        kind: str,
        variant: str,
        size: str,
        seed: int,
        rate: float,
        fraction: float = 1.0,
        ablation: str | None = None,
    ) -> Cell:
        group = ablation or variant
        name = f"{kind}-{group}-{size}-seed{seed}" + (f"-lr{rate:g}" if kind == "tuning" else "")
        changed = self.config.ablations[ablation].set if ablation else {}
        keys, budget = self._keys(name, seed, rate), self.config.tokens[size][-1]
        tokens = self._tokens(variant, size, round(budget * fraction), changed)
        config = self._compose(variant, size, changed, keys, tokens)
        tried = ((RATE, rate),) if kind == "tuning" else ()
        return Cell(name, kind, group, size, seed, config, budget=budget, changed=tried)

    def _compose(self, variant: str, size: str, changed: dict, keys: dict, tokens: int) -> RunConfig:
        described = self.config.variants[variant][size]
        overrides = as_overrides(self.config.set, described, changed, keys, {"training.tokens": tokens})
        return load(self.config.base, overrides)

    def _tokens(self, variant: str, size: str, budget: int, changed: Keys) -> int:
        """Return the tokens that equal `budget` tokens of the first variant, in whole batches."""
        theirs, _ = self._cost(self.config.first, size, ())
        ours, step = self._cost(variant, size, tuple(changed.items()))
        tokens = budget * theirs / ours if self.config.equal == "flops" else budget
        return max(1, round(tokens / step)) * step

    @functools.cache  # noqa: B019 - a process has one study
    def _cost(self, variant: str, size: str, changed: tuple[tuple[str, Any], ...]) -> tuple[int, int]:
        """Return the training FLOPs of a token, and the tokens of a step."""
        config = self._compose(variant, size, dict(changed), {}, self.config.tokens[size][-1])
        return flops.training(config.model, config.data.sequence_length), config.tokens_per_step


def final_loss(cell: Cell, metric: str = "validation/loss") -> float:
    """Return the last validation loss of a run; infinite if it has none, or if it was not finite."""
    loss = last_value(metrics_so_far(cell.folder.metrics), metric)
    return float("inf") if loss is None else loss
