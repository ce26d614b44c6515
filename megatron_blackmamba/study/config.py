"""A study, described: variants × sizes × seeds at equal training FLOPs, and how learning rates are chosen."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from megatron_blackmamba.config.load import config_folder, keys, load
from megatron_blackmamba.settings import Section, file_kinds
from megatron_blackmamba.settings.yaml_files import read_yaml

Keys = dict[str, Any]
"""Keys of a run and their values: `model.pattern: MEME`."""
Scalar = bool | int | float | str | None
BRANCH = "branch."
"""Before a key of a grid that branches change and their trunk does not."""
OWN = (
    *("name", "folder", "start.", "resume.", "data.kind", "data.mixture", "data.seed", "training.seed"),
    *("training.tokens", "training.stop_after_steps", "training.evaluate_every"),
    *("optimizer.decay", "optimizer.decay_tokens", "optimizer.min_learning_rate"),
)
"""What a study sets itself."""
RATE = "optimizer.learning_rate"
OF_TRUNKS = (RATE, "training.global_batch", "training.batch_ramp", "data.sequence_length")
"""What decides, with OWN, where a branch leaves its trunk and how it goes on."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class StudyError(ValueError):
    """A study that cannot be read or continued; the message says what to do."""


class TuningConfig(Section):
    """The choice of each variant's learning rate: the one with the lowest validation loss."""

    size: str
    """The size to tune at; other sizes take the same learning rate."""
    learning_rates: list[float] = Field(min_length=1)
    fraction: float = Field(0.5, gt=0, le=1)
    """Part of the tokens of a whole run."""
    seed: int = 1


class AblationConfig(Section):
    """A variant with some keys changed, at one size, with its variant's learning rate."""

    of: str
    size: str
    set: Keys
    seeds: list[int] = Field([1], min_length=1)


class SeriesConfig(Section):
    """Some points of a study, which are trained one after another."""

    sizes: list[str] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    variants: list[str] = Field([])
    """Empty: all of the study that have the size."""
    budgets: int | None = Field(None, ge=1)
    """Only this many of the smallest budgets of each size; null: all."""
    grid: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = Field({})
    """Keys of a run, each with the values to try; all combinations are trained. Empty: the variants as they are.

    `branch.KEY` changes KEY after the trunk only, which is then the variant's own."""

    best_rate: bool = False
    """Train each variant at its best learning rate, which the grids of the series without this choose first."""

    @field_validator("grid")
    @classmethod
    def _can_be_changed(cls, grid: dict[str, list[Scalar]]) -> dict[str, list[Scalar]]:
        from megatron_blackmamba.training.branch import may_differ
        from megatron_blackmamba.training.start.resume import under

        known = keys()
        for key in grid:
            plain = key.removeprefix(BRANCH)
            if plain not in known:
                raise ValueError(f"{key}: a run has no key {plain!r}")
            if under(plain, OWN):
                raise ValueError(f"{key}: the study sets {plain} itself")
            if plain != key and (under(plain, OF_TRUNKS) or not may_differ(plain)):
                raise ValueError(f"{key}: a branch goes on with its trunk's {plain}")
        return grid


class PrimaryConfig(Section):
    """A comparison that was declared before its seeds were trained: loss of `one` less loss of `other`."""

    one: str
    other: str
    gain_on: tuple[str, str] | None = None
    """Compare what `one` and `other` gain on these two: the loss of each less that of its own."""
    size: str
    budget: int
    seeds: list[int] = Field(min_length=2)
    """All of them decide; with fewer there is no conclusion."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Return all variants of the comparison."""
        return (self.one, self.other, *(self.gain_on or ()))

    @property
    def sides(self) -> tuple[str, str]:
        """Return the words for both sides."""
        if self.gain_on is None:
            return self.one, self.other
        return f"({self.one} − {self.gain_on[0]})", f"({self.other} − {self.gain_on[1]})"


class CorpusConfig(Section):
    """The text that a study gathers, and its tokenizer."""

    vocabulary: int = Field(4096, ge=257)
    """Tokens of the tokenizer that is trained on the corpus."""
    megabytes: int = Field(60, gt=0)
    """Most text gathered from this machine, before near-duplicates are removed."""
    folders: list[str] = Field([])
    """More folders with sources and documentation, in addition to this Python's; those that are missing are skipped."""
    packages: str | None = None
    """A requirements file of wheels with hashes, shipped or in the current folder: all text is theirs."""
    weights: dict[str, float] = Field({})
    """Weight of each source in the mixture; default: 1."""
    near_duplicates: bool = False
    """Remove near-duplicates with `blackmamba data dedup`, which needs datatrove."""
    unseen: bool = False
    """Validate on text of another kind too, which no run trains on: manual pages, or the licences in packages."""


class LengthConfig(Section):
    """How far the trained models read, to show their loss by position."""

    tokens: int = Field(ge=128)
    sequences: int = Field(16, ge=1)
    """Documents to read that far."""


class StudyConfig(Section):
    """One study file."""

    about: str
    """What the study asks, for its page."""
    base: list[str] = Field(min_length=1)
    """Config files or shipped names that every run begins with."""
    set: Keys = Field({})
    """Keys of every run."""
    corpus: CorpusConfig = CorpusConfig()
    """The text and its tokenizer."""
    length: LengthConfig | None = None
    """Read the validation text far beyond the training length; null: do not."""
    variants: dict[str, dict[str, Keys]] = Field(min_length=1)
    """For each variant, the keys of each size. The first variant sets the FLOPs."""
    tokens: dict[str, Annotated[list[int], BeforeValidator(_as_list)]] = Field(min_length=1)
    """For each size, the tokens of the first variant; `equal` says how many the others get.

    Several budgets, in rising order: one trunk with a constant learning rate, and a branch with its decay for each."""
    equal: Literal["flops", "tokens"] = "flops"
    """The others train for the same FLOPs as the first variant, or on as many tokens."""
    decay: float = Field(0.2, gt=0, lt=1)
    """Part of a budget over which the learning rate decays, in studies of several budgets."""
    series: list[SeriesConfig] = Field([])
    """The points of a study of several budgets, those that tell most first."""
    primary: list[PrimaryConfig] = Field([])
    """The comparisons that decide what a study on branches was started for."""
    pictured: dict[str, str] = Field({})
    """Variants of the picture, and what it calls them; those with experts are compared with all others in tables too.

    Empty: the first variant, and the dense ones of equal FLOPs."""
    parts: dict[str, list[tuple[str, str]]] = Field({})
    """Parts of a model, each with pairs of variants that differ in it alone: the mean of their differences is shown."""
    watched: list[int] = Field([])
    """Seeds whose routers are looked at. Empty: the first of `seeds`."""
    seeds: list[int] = Field([1, 2, 3], min_length=1)
    tuning: TuningConfig
    """Where the file has none: the learning rate of `base` and `set`, for every variant."""
    ablations: dict[str, AblationConfig] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, content: Any) -> Any:
        """Accept `vocabulary` and `corpus_megabytes` outside of `corpus`, as in studies of version 0.2 and before."""
        if not isinstance(content, dict):
            return content
        moved = {"vocabulary": "vocabulary", "corpus_megabytes": "megabytes"}
        corpus = {new: content[old] for old, new in moved.items() if old in content} | content.get("corpus", {})
        return {key: value for key, value in content.items() if key not in moved} | {"corpus": corpus}

    @model_validator(mode="before")
    @classmethod
    def _rate_of_base(cls, content: Any) -> Any:
        """Take the learning rate of the base where nothing is tuned."""
        try:
            size = next(iter(content["tokens"]))
            first = next(iter(content["variants"].values()))[size]
        except (TypeError, KeyError, AttributeError, StopIteration):  # what is missing has a message of its own
            return content
        if "tuning" in content:
            return content
        run = load(content.get("base", []), as_overrides(content.get("set", {}), first))
        return content | {"tuning": {"size": size, "learning_rates": [run.optimizer.learning_rate]}}

    @model_validator(mode="after")
    def _sizes_match(self) -> "StudyConfig":
        for name, sizes in self.variants.items():
            lacks_some = sizes and sizes.keys() < self.tokens.keys()
            if sizes.keys() != self.tokens.keys() and not (lacks_some and self.has_branches and name != self.first):
                raise ValueError(f"variants.{name} has the sizes {list(sizes)}, and tokens has {list(self.tokens)}")
        if self.tuning.size not in self.tokens:
            raise ValueError(f"tuning.size={self.tuning.size} is none of {list(self.tokens)}")
        for size, budgets in self.tokens.items():
            if not budgets or sorted(set(budgets)) != budgets:
                raise ValueError(f"tokens.{size}={budgets}: list budgets in rising order")
        if self.has_branches and not self.series:
            raise ValueError("series lists the points to train in studies of several budgets: it has none")
        if self.has_branches and self.ablations:
            raise ValueError("ablations are for studies with one budget for each size: use a series with a grid")
        for number, series in enumerate(self.series):
            if (series.budgets or 0) > (most := max(len(self.tokens.get(size, ())) for size in series.sizes)):
                raise ValueError(f"series.{number}.budgets={series.budgets}: its sizes have at most {most}")
            if unknown := [*set(series.sizes) - set(self.tokens), *set(series.variants) - set(self.variants)]:
                raise ValueError(f"series.{number}: {unknown[0]} is no size or variant of this study")
            for variant, size in itertools.product(series.variants, series.sizes):
                if size not in self.variants[variant]:
                    raise ValueError(f"series.{number}: variants.{variant} has no size {size}")
            if series.best_rate and RATE in series.grid:
                raise ValueError(f"series.{number}: best_rate chooses {RATE}. Remove it from the grid")
        for part, pairs in self.parts.items():
            if absent := set(itertools.chain(*pairs)) - set(self.variants):
                raise ValueError(f"parts.{part}: {min(absent)} is no variant of this study")
        for number, pair in enumerate(self.primary):
            points = {(variant, size, n) for variant in self.variants for size, all in self.tokens.items() for n in all}
            if not {(each, pair.size, pair.budget) for each in pair.variants} <= points:
                raise ValueError(f"primary.{number}: no such variant, size or budget in this study")
            for variant, seed in itertools.product(pair.variants, pair.seeds):
                if len(_ways(self, variant, pair.size, seed)) > 1:
                    raise ValueError(
                        f"primary.{number}: the series train {variant} with seed {seed} in several ways: declare one"
                    )
        if self.length is not None and self.has_branches:
            raise ValueError("length is measured in studies with one budget for each size: remove it, or the budgets")
        for name, ablation in self.ablations.items():
            if ablation.of not in self.variants or ablation.size not in self.tokens:
                raise ValueError(f"ablations.{name} is not a variant and size of this study")
        return self

    @property
    def has_branches(self) -> bool:
        """Return whether each run is a branch of a trunk that several budgets share."""
        return any(len(budgets) > 1 for budgets in self.tokens.values())

    @property
    def first(self) -> str:
        """Return the variant that determines the FLOPs."""
        return next(iter(self.variants))

    @property
    def deciding(self) -> dict[str, Any]:
        """Return what decides the losses of a study with branches, by its place in the file.

        Keys outside of `training` that a run may change when it resumes, such as `checkpoint.keep_last`, decide none.
        """
        from megatron_blackmamba.training.start.resume import rule_of

        shared = {k: v for k, v in self.set.items() if k.startswith("training.") or rule_of(k).resume != "free"}
        whole = self.model_dump(include={"base", "corpus", "equal", "decay"})
        rates = {"set": shared, "first variant": self.first, "tuning.learning_rates": self.tuning.learning_rates}
        variants = {f"variants.{name}.{size}": keys for name, of in self.variants.items() for size, keys in of.items()}
        return whole | rates | variants


def _ways(study: StudyConfig, variant: str, size: str, seed: int) -> set[tuple[Any, ...]]:
    """Return the ways in which the series train a variant with a seed: at its best rate or not, and changed keys."""
    found = set()
    for series in study.series:
        if size in series.sizes and seed in series.seeds and variant in (series.variants or study.variants):
            keys = ([(key, value) for value in values] for key, values in series.grid.items())
            found |= {(series.best_rate, *each) for each in itertools.product(*keys)}
    return found


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first place at which two studies decide otherwise; what only one of them has is growth."""
    return next((place for place in before if place in now and before[place] != now[place]), None)


def here_or_shipped(name: str, shipped_as: str) -> Path:
    """Return a file of the current folder, else the one of the shipped studies."""
    return Path(name) if Path(name).is_file() else config_folder() / "studies" / shipped_as


def shipped() -> list[str]:
    """Return the names of the shipped studies."""
    return sorted(path.stem for path in (config_folder() / "studies").glob("*.yaml"))


def read_study(name: str) -> StudyConfig:
    """Return a shipped study, or the one in a file."""
    path = here_or_shipped(name, f"{name}.yaml")
    if not path.is_file():
        raise StudyError(f"no study {name!r}: name a file, or one of {', '.join(shipped())}")
    try:
        content = read_yaml(path)
        file_kinds.refuse_other_kind(content, path, "study")
        return StudyConfig.model_validate(content)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        raise StudyError(f"{path}: {where + ': ' if where else ''}{found['msg']}") from None


def as_overrides(*keys: Mapping[str, Any]) -> list[str]:
    """Return keys as the command line has them; later ones win."""
    merged = {key: value for group in keys for key, value in group.items()}
    return [f"{key}={'null' if value is None else value}" for key, value in merged.items()]
