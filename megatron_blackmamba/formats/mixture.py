"""The mixture file: named sources of token shards, how much each weighs, and when the weights change.

A source is drawn with probability ∝ tokens × weight, as in the paper's table. Numbers are kept as exact fractions, so
that the order of samples they imply is the same on every machine.
"""

import difflib
import glob
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from megatron_blackmamba.formats.document_sample import Sampled, TrainingSamples, is_among
from megatron_blackmamba.formats.find_shards import shards_at
from megatron_blackmamba.formats.reads import Read
from megatron_blackmamba.formats.remote import is_remote, local
from megatron_blackmamba.formats.shards import (
    SUFFIXES,
    RawFile,
    Shard,
    ShardManifest,
    SourceFile,
    missing_parts,
    shard_names,
    shard_prefix,
)
from megatron_blackmamba.formats.source_schedule import Schedule
from megatron_blackmamba.settings import ConfigError, Section, file_kinds
from megatron_blackmamba.settings.yaml_files import read_yaml

Item = TypeVar("Item")
T = TypeVar("T")

MOST_WEIGHT = 1e12
"""Tokens × weight stays a number that prints."""


class MixtureError(ValueError):
    """A mixture that cannot be used; the message says which file, which source, and what to do."""


def _whole(value: object) -> object:
    """Accept whole numbers written as floats, such as 300e9 and 2.2e9."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_whole)]
Paths = Annotated[list[str], BeforeValidator(_list)]


class IncompleteError(MixtureError):
    """A folder of shards in which some are missing."""


def _source_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            "a name of a source begins with a letter or a digit of ASCII and goes on with these, '_', '.' and '-',"
            " since it becomes part of keys and file names. Choose another name"
        )
    return name


class Source(Section):
    """One corpus."""

    name: Annotated[str, AfterValidator(_source_name)]
    shards: Paths = Field([])
    """Folders, globs or single shards; relative to `root`."""
    validation: Paths = Field([])
    """Shards held out of training, given like `shards`; they may be among those."""
    tokens: Count | None = Field(None, gt=0)
    """Measured tokens, for the probability; without it, what the shards hold."""
    weight: float = Field(1.0, ge=0, le=MOST_WEIGHT, allow_inf_nan=False)
    max_epochs: float | None = Field(None, gt=0)
    """A plan that reads the source more often than this is refused."""


class Phase(Section):
    """From some sample on, other weights."""

    from_sample: Count | None = Field(None, gt=0)
    from_tokens: Count | None = Field(None, gt=0)
    """Rounded up to whole samples."""
    weights: dict[str, Annotated[float, Field(ge=0, le=MOST_WEIGHT, allow_inf_nan=False)]]
    """By source; one that is not named keeps the weight it had."""

    @model_validator(mode="after")
    def _one_start(self) -> "Phase":
        if (self.from_sample is None) == (self.from_tokens is None):
            raise ValueError("a phase starts at from_sample or at from_tokens: give one of them")
        return self

    def start(self, sequence_length: int) -> int:
        """Return the first sample of the phase."""
        if self.from_sample is not None:
            return self.from_sample
        return -(-(self.from_tokens or 0) // sequence_length)


IS_A_FILE = "A mixture is a YAML file that lists folders of shards; see docs/mixtures.md"


class Mixture(Section):
    """The sources that a run reads, with their weights."""

    root: str = "."
    """Base of relative paths, itself relative to the mixture file; $VARIABLES are expanded."""
    sources: list[Source] = Field(min_length=1)
    phases: list[Phase] = Field([])
    max_overlap: float = Field(0.1, ge=0, le=1)
    """Largest share of a source's validation documents that training shards may hold too; 1 allows all."""
    read_before: dict[str, list[Read]] = Field({})
    """What runs with other sequence lengths have read of a source, by its content; a branch writes this."""
    _folder: Path = PrivateAttr(Path("."))

    @model_validator(mode="after")
    def _names(self) -> "Mixture":
        twice = next((name for i, name in enumerate(self.names) if name in self.names[:i]), None)
        if twice:
            raise ValueError(f"source {twice!r} is given twice")
        for number, phase in enumerate(self.phases, 1):
            unknown = next((name for name in phase.weights if name not in self.names), None)
            if unknown:
                raise ValueError(f"phase {number} weighs {unknown!r}; the sources are {', '.join(self.names)}")
        for number, weights in enumerate(self.weights()):
            if not any(weights):
                raise ValueError(
                    f"phase {number}: every source has weight 0" if number else "every source has weight 0"
                )
        return self

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Mixture":
        """Read and check the file; the shards it names are looked for later."""
        path = Path(path)
        try:
            content = read_yaml(path)
            file_kinds.refuse_other_kind(content, path, "mixture")
            mixture = cls.model_validate(content)
        except ConfigError as error:
            needed = "" if path.suffix in (".yaml", ".yml") else f". {IS_A_FILE}"
            raise MixtureError(f"{error}{needed}") from None
        except ValidationError as error:
            raise MixtureError("\n".join(f"{path}: {_explain(problem)}" for problem in error.errors())) from None
        mixture._folder = path.resolve().parent
        return mixture

    def independent(self) -> "Mixture":
        """Return the same mixture with an absolute root and without variables, for a file in any folder."""
        root = self._root if is_remote(self._root) else os.path.abspath(self._root)
        sources = self._with_paths(lambda source, pattern: _fill_in(pattern, source.name))
        return self.model_copy(update={"root": root, "sources": sources})

    def with_absolute_paths(self) -> list[Source]:
        """Return the sources with paths that hold in any mixture file."""
        return self._with_paths(self._path)

    def _with_paths(self, path: Callable[[Source, str], str]) -> list[Source]:
        """Return the sources with other paths of their shards."""
        return [
            source.model_copy(
                update={key: [path(source, each) for each in getattr(source, key)] for key in ("shards", "validation")}
            )
            for source in self.sources
        ]

    def to_yaml(self) -> str:
        """Return the content of a mixture file."""
        return yaml.safe_dump(self.model_dump(exclude_defaults=True), sort_keys=False, allow_unicode=True)

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]

    def weights(self) -> list[list[Fraction]]:
        """Return the weight of each source in each phase; the first phase is the one in `sources`."""
        phases = [{source.name: source.weight for source in self.sources}]
        for phase in self.phases:
            phases.append({**phases[-1], **phase.weights})
        return [[Fraction(str(weights[name])) for name in self.names] for weights in phases]

    def starts(self, sequence_length: int) -> list[int]:
        """Return the first sample of each phase."""
        starts = [0, *(phase.start(sequence_length) for phase in self.phases)]
        for number, (before, after) in enumerate(pairwise(starts), 1):
            if after <= before:
                raise MixtureError(f"phase {number} starts at sample {after}, not after the one before ({before})")
        return starts

    def schedule(self, tokens: Sequence[int], sequence_length: int, tie_break: Sequence[str] | None = None) -> Schedule:
        """Return the schedule of the sources; `tokens` gives the size of sources whose file entry has none."""
        stated = [source.tokens or measured for source, measured in zip(self.sources, tokens, strict=True)]
        products = [[n * w for n, w in zip(stated, phase, strict=True)] for phase in self.weights()]
        return Schedule(products, self.starts(sequence_length), tie_break)

    def open_shards(self, source: Source) -> tuple[list[Shard], list[Shard]]:
        """Open the source's training and validation shards, each sorted by content, not by name."""
        training, held_out = self._split(source)
        if not training:
            raise MixtureError(
                f"source {source.name!r}: no shards to train on"
                + (" beside those held out for validation" if held_out else "; name them under `shards`")
            )
        shards, validation = [
            sorted((Shard.open(prefix) for prefix in prefixes), key=lambda shard: shard.manifest.bin_sha256)
            for prefixes in (training, held_out)
        ]
        self._refuse_incomplete(source, [*shards, *validation])
        return shards, validation

    def open_all(self) -> dict[str, tuple[list[Shard], list[Shard]]]:
        """Open the shards of every source, by its name; one error names all sources that lack shards."""
        return dict(zip(self.names, collect(self.open_shards, self.sources), strict=True))

    def prefixes(self) -> list[Path]:
        """Return all shards of all sources, without opening them; one error names all sources that lack shards."""
        splits = collect(self._split, self.sources)
        return [prefix for split in splits for part in split for prefix in part]

    def folders(self) -> list[Path]:
        """Return the folders of all shards, without those that lie inside another one."""
        found = sorted({prefix.parent for prefix in self.prefixes()})
        return [
            folder for folder in found if not any(folder.is_relative_to(other) for other in found if other != folder)
        ]

    def _split(self, source: Source) -> tuple[list[Path], list[Path]]:
        training, held_out = collect(partial(self._prefixes, source), ("shards", "validation"))
        return [p for p in training if p not in set(held_out)], held_out

    def _refuse_incomplete(self, source: Source, opened: Sequence[Shard]) -> None:
        """Refuse a folder that lacks shards. Shards that are named one by one or by a glob may be a part."""
        named = [self._path(source, pattern) for pattern in (*source.shards, *source.validation)]
        folders = [path for path in map(local, named) if path.is_dir()]
        for folder in sorted({shard.prefix.parent for shard in opened}):
            missing, expected = missing_parts(shard.manifest for shard in opened if shard.prefix.parent == folder)
            if missing and any(folder.is_relative_to(given) for given in folders):
                raise IncompleteError(
                    f"source {source.name!r}: {folder} is incomplete: it lacks {shard_names(missing)} of {expected} "
                    f"shards. Make them with `blackmamba data tokenize`, or name what is there: {folder}/shard_*"
                )

    def _path(self, source: Source, pattern: str) -> str:
        filled = _fill_in(pattern, source.name)
        if is_remote(filled) or not is_remote(self._root):
            return filled if is_remote(filled) else os.path.normpath(os.path.join(self._root, filled))
        return f"{self._root.rstrip('/')}/{filled}"

    @property
    def _root(self) -> str:
        root = _fill_in(self.root, "root")
        return root if is_remote(root) else os.path.join(self._folder, root)

    def _glob(self, source: Source, pattern: str) -> list[Path]:
        """Return the shards that a pattern matches; brackets belong to a name if there is one."""
        filled, root = _fill_in(pattern, source.name), glob.escape(self._root)
        literal, wild = (os.path.join(root, text) for text in (filled.replace("[", "[[]"), filled))
        return _glob(os.path.normpath(literal)) or _glob(os.path.normpath(wild))

    def _prefixes(self, source: Source, key: str) -> list[Path]:
        found = collect(partial(self._matches, source, key), getattr(source, key))
        return list(dict.fromkeys(chain.from_iterable(found)))

    def _matches(self, source: Source, key: str, pattern: str) -> list[Path]:
        full = self._path(source, pattern)
        matches = shards_at(full) or ([] if is_remote(full) else self._glob(source, pattern))
        if not matches:
            raise MixtureError(
                f"source {source.name!r}: {key}: {pattern!r} names no shard (looked for {full}){_raw(full)}"
            )
        return matches


def collect(call: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    """Return what the call returns for each item; raise one MixtureError with the messages of all that failed."""
    results: list[T] = []
    errors: list[MixtureError] = []
    for item in items:
        try:
            results.append(call(item))
        except MixtureError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise MixtureError("\n".join(dict.fromkeys(map(str, errors))))
    return results


def content_fingerprint(shards: Sequence[Shard]) -> str:
    """Return the fingerprint of a source: it depends on the tokens of its shards, not on names or paths."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        digest.update(f"{shard.manifest.bin_sha256} {shard.manifest.tokens} {shard.manifest.dtype}\n".encode())
    return digest.hexdigest()


def check_together(
    opened: Mapping[str, tuple[list[Shard], list[Shard]]],
    vocab_size: int | None = None,
    eod_reset: int | None = None,
    *,
    one_eod: bool = False,
    max_overlap: float,
) -> None:
    """Refuse shards that do not fit together, or do not fit the model.

    These are two tokenizers, duplicate tokens, validation leaks beyond `max_overlap`, tokens beyond the model's
    vocabulary, and another EOD than the token after which the model resets its state. With `one_eod`
    (data.mask_first_token), different EODs are refused too.
    """
    seen: dict[str, tuple[Path, str]] = {}
    first: Shard | None = None
    for name, (training, held_out) in opened.items():
        for number, shard in enumerate((*training, *held_out)):
            manifest, first = shard.manifest, first or shard
            if vocab_size is not None and manifest.vocab_size > vocab_size:
                raise MixtureError(
                    f"source {name!r}: {shard.prefix} was tokenized with a vocabulary of {manifest.vocab_size}, "
                    f"the model has {vocab_size}: set model.vocab_size to at least that, or tokenize the text with the"
                    " tokenizer of the model that start.from continues"
                )
            if eod_reset not in (None, manifest.eod_id):
                raise MixtureError(
                    f"model.eod_reset={eod_reset}: documents of {shard.prefix} end with token {manifest.eod_id}. "
                    f"Set model.eod_reset={manifest.eod_id}"
                )
            if one_eod and manifest.eod_id != first.manifest.eod_id:
                found = f"{first.manifest.eod_id} in {first.prefix}, {manifest.eod_id} in {shard.prefix}"
                raise MixtureError(f"data.mask_first_token: the shards end documents with different tokens: {found}")
            if manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
                raise MixtureError(
                    f"source {name!r}: {shard.prefix} was made with another tokenizer ({manifest.tokenizer}) "
                    f"than {first.prefix} ({first.manifest.tokenizer}): tokenize one of them again"
                )
            if manifest.tokens and manifest.bin_sha256 in seen:
                other, source = seen[manifest.bin_sha256]
                same = f"is in source {source!r} too" if other == shard.prefix else f"holds the same tokens as {other}"
                if number >= len(training):
                    raise MixtureError(f"source {name!r}: {shard.prefix} {same}: remove one")
                raise MixtureError(
                    f"source {name!r}: {shard.prefix} {same}, which would be read twice an epoch: "
                    "remove one; to see a source more often, raise its weight"
                )
            seen[manifest.bin_sha256] = shard.prefix, name
    _refuse_leaks(opened)
    _refuse_overlap(opened, max_overlap)


def _refuse_leaks(opened: Mapping[str, tuple[list[Shard], list[Shard]]]) -> None:
    """Refuse a raw file whose documents are in training and in validation, whatever seed or fields made the shards."""
    held_out: dict[str, dict[tuple[str, float], tuple[str, Path, str]]] = defaultdict(dict)
    for name, (_, validation) in opened.items():
        for shard in validation:
            side = _split(shard.manifest, "validation")
            for source in shard.manifest.sources:
                for raw in source.all_raw:
                    held_out[raw.sha256][side] = (raw.name, shard.prefix, name)
    for name, (training, _) in opened.items():
        for shard in training:
            split, share = _split(shard.manifest, "train")
            for source in shard.manifest.sources:
                for raw in source.all_raw:
                    for (other, least), where in held_out.get(raw.sha256, {}).items():
                        if not split or other != split or share < least:  # a larger share holds out the same, and more
                            raise MixtureError(f"source {name!r}: " + _leak(shard, source, raw, *where))


def _split(manifest: ShardManifest, side: str) -> tuple[str, float]:
    """Return the split of which a shard is this side, by what decides it, and its share; empty if it is none."""
    split = manifest.options.get("hold_out")
    if not split or split["side"] != side:
        return "", 0.0
    alike = {**manifest.options, "hold_out": {**split, "side": None, "share": None}, "lengths": None}
    return json.dumps(alike, sort_keys=True), split["share"]


def _refuse_overlap(opened: Mapping[str, tuple[list[Shard], list[Shard]]], most: float) -> None:
    """Refuse validation documents that are in training shards under other raw files, as far as samples show them."""
    training = [shard for shards, _ in opened.values() for shard in shards]
    samples = TrainingSamples(_samples(training))
    for name, (_, held_out) in opened.items():
        found = samples.overlap(_samples(held_out), most)
        if found:
            held, there = (_where(shards, found.hashes) for shards in (held_out, training))
            raise MixtureError(
                f"source {name!r}: {found.found} of the {found.compared} validation documents that could be compared "
                f"({found.share:.1%}) are in training shards too, for example {held}, which is {there}: make the "
                "training shards again without them (--exclude PATTERN or --split train), or set max_overlap in the "
                "mixture file to allow it"
            )


def _samples(shards: Sequence[Shard]) -> list[Sampled]:
    return [sampled for shard in shards if (sampled := shard.manifest.sampled) is not None]


def _where(shards: Sequence[Shard], hashes: np.ndarray) -> str:
    """Return the raw file and record of the first document with one of these hashes."""
    wanted = hashes[:1]
    for shard in shards:
        sampled = shard.manifest.sampled
        if sampled is not None and is_among(wanted, sampled.hashes).all():
            number = int(sampled.numbers[np.searchsorted(sampled.hashes, wanted[0])])
            file, record = shard.manifest.raw_record(number)
            return f"{file}{'' if record is None else f', record {record}'} in {shard.prefix}"
    raise AssertionError("found in no shard")


def _leak(shard: Shard, file: SourceFile, raw: RawFile | SourceFile, there: str, other: Path, source: str) -> str:
    inside = "" if raw is file else f" (in {file.name})"
    alias = "" if there == raw.name else f" (there called {there})"
    return (
        f"{shard.prefix} trains on {raw.name}{inside}, which {other}{alias} of source {source!r} holds out for "
        "validation: make the training shards again without it (--exclude PATTERN or --split train)"
    )


def _glob(pattern: str) -> list[Path]:
    """Return shards that have any of their files: Shard.open refuses incomplete ones, so a glob must not hide them."""
    files = [glob.glob(str(shard_prefix(pattern)) + suffix, recursive=True) for suffix in SUFFIXES]
    return sorted({shard_prefix(path) for path in chain.from_iterable(files)})


def _raw(path: str) -> str:
    """Return how to make shards of a file, or of a folder with files, that is none."""
    if not (os.path.isfile(path) or (os.path.isdir(path) and any(True for _ in os.scandir(path)))):
        return ""
    if os.path.isdir(path) and os.listdir(path) == ["tokenizer.json"]:
        return (
            ". `data tokenize` has not finished here: run it again, with a larger --hold-out if it chose no document,"
            " or do not name this folder"
        )
    out = f"{os.path.splitext(path)[0] if os.path.isfile(path) else path}_tokens"
    return (
        f". It holds files but no token shards. Make them with `blackmamba data tokenize {path} {out} "
        f"--tokenizer FILE`, and name {out} here"
    )


def _fill_in(text: str, where: str) -> str:
    filled = os.path.expanduser(os.path.expandvars(text))
    missing = re.search(r"\$(\w+|\{\w+\})", filled)
    if missing:
        raise MixtureError(f"{where}: {text!r}: the environment variable {missing[1].strip('{}')} is not set")
    return filled


def _nearest(key: str, top: object, depth: int) -> str:
    section: type[Section] = Mixture if depth == 1 else Phase if top == "phases" else Source
    near = difflib.get_close_matches(key, section.model_fields, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(section.model_fields)}"


def _explain(problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}; " + _nearest(str(problem["loc"][-1]), problem["loc"][0], len(problem["loc"]))
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message} (given: {problem['input']!r})" if where else message
