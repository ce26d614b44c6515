"""Figures of token shards: counts, lengths, languages, near-copies, evaluation items, and documents to read."""

import random
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.inspection import Document, Lengths, documents_at, lengths_of
from megatron_blackmamba.data_tools.mixture import read_mixtures
from megatron_blackmamba.data_tools.near_copies import NearCopies, near_copies
from megatron_blackmamba.data_tools.recipes import Language
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.shards import Shard

VALIDATION = " (validation)"
_LETTERS = 2000
"""Characters by which the script of a document is told."""


@dataclass(frozen=True)
class Group:
    """The training or the validation shards of a source."""

    name: str
    shards: list[Shard]
    lengths: Lengths
    sample: list[Document]
    languages: Counter[str]

    def total(self, name: str) -> int:
        """Return the sum of a count in the manifests."""
        return sum(getattr(shard.manifest, name) for shard in self.shards)

    @property
    def raw_files(self) -> int:
        return len({source.sha256 for shard in self.shards for source in shard.manifest.sources})

    @property
    def skipped(self) -> int:
        return sum(sum(shard.manifest.rejected.values()) for shard in self.shards)


@dataclass(frozen=True)
class Found:
    """Evaluation items of a task in the sample of documents."""

    task: str
    looked_for: int
    items: set[str] = field(default_factory=set)
    documents: Counter[str] = field(default_factory=Counter)
    """By group."""
    example: str = ""


@dataclass(frozen=True)
class Corpus:
    """The figures of a corpus."""

    groups: list[Group]
    by: str
    """How languages were told: `language` or `script`."""
    copies: NearCopies
    contamination: list[Found]


def groups_of(paths: Sequence[str]) -> dict[str, list[Shard]]:
    """Return the shards by source, those for validation apart: of mixture files, and of folders.

    A folder named `validation`, as --hold-out makes it, holds the validation shards of the folder around it.
    """
    groups: dict[str, list[Shard]] = {}
    mixtures = read_mixtures(paths)
    for path in paths:
        if path in mixtures:
            for name, (training, validation) in mixtures[path].open_all().items():
                groups.setdefault(name, []).extend(training)
                groups.setdefault(name + VALIDATION, []).extend(validation)
            continue
        for shard in find_shards(path):
            folder = Path(shard.prefix).parent
            side = VALIDATION if folder.name == "validation" else ""
            source = folder.parent if folder.name in ("train", "validation") else folder
            groups.setdefault(f"{source}{side}", []).append(shard)
    return {name: shards for name, shards in groups.items() if shards}


def measure(
    paths: Sequence[str],
    *,
    sample: int = 500,
    seed: int = 0,
    most_tokens: int = 200_000_000,
    against: Sequence[str] = (),
    tokenizer: str | None = None,
) -> Corpus:
    """Measure a corpus. `sample` random documents of each group are read for languages and evaluation items."""
    tell, by = _teller()
    index = _index(against)
    groups = []
    for name, shards in groups_of(paths).items():
        total = sum(shard.manifest.documents for shard in shards)
        numbers = sorted(random.Random(f"{seed} {name}").sample(range(total), min(sample, total)))
        drawn = list(documents_at(shards, numbers, tokenizer))
        languages = Counter(tell(document.text) for document in drawn)
        groups.append(Group(name, shards, lengths_of(name, shards), drawn, languages))
    if not groups:
        raise InputError(f"{', '.join(paths)}: no shard. Name a mixture file or folders of shards")
    copies = near_copies({group.name: group.shards for group in groups}, most_tokens)
    return Corpus(groups, by, copies, _contamination(groups, *index) if index else [])


def _teller() -> tuple[Any, str]:
    """Return a function from a text to its language, or to its script where no model of languages is installed."""
    try:
        model = Language()
    except InputError:
        return script_of, "script"
    return (lambda text: model.identify(text)[0]), "language"


def script_of(text: str) -> str:
    """Return the script of most letters of a text."""
    letters = (unicodedata.name(letter, "OTHER").split()[0] for letter in text[:_LETTERS] if letter.isalpha())
    most = Counter(letters).most_common(1)
    return most[0][0].capitalize() if most else "No letters"


def _index(against: Sequence[str]) -> tuple[Any, list[Found]] | None:
    if not against:
        return None
    from megatron_blackmamba.data_tools.evaluation_items import read_evaluations, task_of
    from megatron_blackmamba.data_tools.item_index import ItemIndex

    evaluations = read_evaluations(against)
    index = ItemIndex([item for each in evaluations for item in each.items], 12)
    short = Counter(map(task_of, index.too_short))
    return index, [Found(each.name, len(each.items) - short[each.name]) for each in evaluations]


def _contamination(groups: Sequence[Group], index: Any, tasks: list[Found]) -> list[Found]:
    from megatron_blackmamba.data_tools.evaluation_items import task_of
    from megatron_blackmamba.data_tools.words import normalize

    by_name = {task.task: task for task in tasks}
    for group in groups:
        for document in group.sample:
            items = [passage.item for passage in index.find(index.split(normalize(document.text)))]
            for item in items:
                by_name[task_of(item)].items.add(item)
            for name in {task_of(item) for item in items}:
                by_name[name].documents[group.name] += 1
    return tasks
