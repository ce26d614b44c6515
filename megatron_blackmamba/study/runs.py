"""The runs of a study, by name: first those that choose the learning rates, then the runs themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.formats.run_folder import Inside, RunFolder
from megatron_blackmamba.formats.step_records import last_value, metrics_so_far
from megatron_blackmamba.plan import flops
from megatron_blackmamba.study.config import StudyConfig, as_overrides


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

    @property
    def folder(self) -> RunFolder:
        """Return the folder of the run."""
        return RunFolder(Path(self.config.folder) / self.config.name)

    @property
    def done(self) -> bool:
        """Return whether the run has consumed its tokens."""
        return self.folder.done.exists()


@dataclass(frozen=True)
class Study:
    """A study in its folder."""

    name: str
    config: StudyConfig
    folder: Path

    corpus = Inside("corpus", "folder")
    mixture = Inside("corpus/mixture.yaml", "folder")

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

    def runs(self, rates: dict[str, float]) -> list[Cell]:
        """Return the runs and ablations, whole comparisons first: a study that is cut short compares something."""
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
        keys = {
            "name": name,
            "folder": str((self.folder / "runs").resolve()),
            "data.kind": "mixture",
            "data.mixture": str(self.mixture.resolve()),
            "training.seed": seed,
            "data.seed": seed,
            "optimizer.learning_rate": rate,
            "optimizer.min_learning_rate": rate / 20,
        }
        config = self._compose(variant, size, changed, keys, self.config.tokens[size])
        tokens = self._tokens(config, size, fraction)
        return Cell(name, kind, group, size, seed, self._compose(variant, size, changed, keys, tokens))

    def _compose(self, variant: str, size: str, changed: dict, keys: dict, tokens: int) -> RunConfig:
        described = self.config.variants[variant][size]
        overrides = as_overrides(self.config.set, described, changed, keys, {"training.tokens": tokens})
        return load(self.config.base, overrides)

    def _tokens(self, config: RunConfig, size: str, fraction: float) -> int:
        """Return the tokens that cost as many FLOPs as the first variant's, in whole batches."""
        first = self._compose(self.config.first, size, {}, {}, self.config.tokens[size])
        theirs = flops.training(first.model, first.data.sequence_length)
        ours = flops.training(config.model, config.data.sequence_length)
        steps = self.config.tokens[size] * fraction * theirs / ours / config.tokens_per_step
        return max(1, round(steps)) * config.tokens_per_step


def final_loss(cell: Cell, metric: str = "validation/loss") -> float:
    """Return the last validation loss of a run; infinite if it has none, or if it was not finite."""
    loss = last_value(metrics_so_far(cell.folder.metrics), metric)
    return float("inf") if loss is None else loss
