"""The texts of evaluation items: from lm-eval's task definitions, or from local files."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.evaluation_rows import FieldChoice, Row, choose_fields, row_of, texts_of
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.sources import Source, find_sources
from megatron_blackmamba.data_tools.streams import Damage, InputStream

_PROMPT = re.compile(r"^\s*(question|q)\s*:|\b(answer|a)\s*:\s*$", re.IGNORECASE)
"""Words that a task's prompt adds to a question; pages do not have them."""


@dataclass(frozen=True)
class Item:
    """One evaluation item and the texts by which it is recognised."""

    name: str
    texts: tuple[str, ...]

    @property
    def task(self) -> str:
        """Return the task or file of the item."""
        return task_of(self.name)


@dataclass(frozen=True)
class Evaluation:
    """The items of one task or file, and the fields that their texts are from."""

    name: str
    items: tuple[Item, ...]
    choice: FieldChoice = field(default_factory=FieldChoice)


def task_of(item: str) -> str:
    """Return the task or file of an item's name."""
    return item.rpartition(":")[0]


def read_items(against: Sequence[str], task_folder: str | None = None) -> list[Item]:
    """Return the items of tasks and files. A name that is no file is one of lm-eval's tasks."""
    return [item for evaluation in read_evaluations(against, task_folder) for item in evaluation.items]


def read_evaluations(
    against: Sequence[str], task_folder: str | None = None, fields: Sequence[str] = ()
) -> list[Evaluation]:
    """Return tasks and files with their items.

    task_folder: a folder with your own task definitions, as lm-eval's --include_path.
    fields: FIELD,... for all files, or FILE=FIELD,... for one.
    """
    files = [name for name in against if Path(name).exists()]
    tasks = [name for name in against if name not in files]
    chosen = _Fields(fields)
    sources = {source.path: source for name in files for source in find_sources([name]).sources}
    names = Counter(source.name for source in sources.values())
    evaluations = [
        _from_file(source, source.name if names[source.name] == 1 else source.path, chosen)
        for source in sources.values()
    ]
    chosen.refuse_unused()
    if tasks:
        evaluations += _from_lm_eval(tasks, task_folder)
    if not any(evaluation.items for evaluation in evaluations):
        raise InputError(f"--against {', '.join(against)}: no item found")
    return evaluations


class _Fields:
    """The fields named by --fields, and whether each was used."""

    def __init__(self, given: Sequence[str]) -> None:
        split = [(file, fields) for file, _, fields in (each.rpartition("=") for each in given)]
        self._of = {file: tuple(name.strip() for name in fields.split(",") if name.strip()) for file, fields in split}
        self._unused = set(self._of)
        empty = next((each for each, (file, _) in zip(given, split, strict=True) if not self._of[file]), None)
        if empty is not None:
            raise InputError(f"--fields {empty}: names no field. Write, for example, --fields question,question+answer")

    def of(self, path: str) -> tuple[str, ...]:
        for file in (path, Path(path).name, ""):
            if file in self._of:
                self._unused.discard(file)
                return self._of[file]
        return ()

    def refuse_unused(self) -> None:
        for file in sorted(self._unused):
            what = f"{file}: is no file of --against" if file else "no file of --against to take fields from"
            raise InputError(f"--fields: {what}. Name a file with --against, or leave the option out")


def contents_of(items: Sequence[Item]) -> dict[str, str]:
    """Return the sha256 of the texts of every file or task, by which a change of them is noticed."""
    hashes: dict[str, Any] = {}
    for item in items:
        line = json.dumps([item.name, item.texts]).encode()
        hashes.setdefault(f"contents of {item.task}", hashlib.sha256()).update(line)
    return {source: found.hexdigest() for source, found in hashes.items()}


def _from_file(source: Source, name: str, chosen: _Fields) -> Evaluation:
    if source.format != "jsonl":
        raise InputError(f"{source.path}: evaluation items must be JSON Lines. Convert the file")
    fields = chosen.of(source.path)
    rows = {
        number: _row(line, f"{source.path}, line {number}", fields)
        for number, line in enumerate(_lines(source.path), start=1)
        if line.strip()
    }
    choice = choose_fields([*rows.values()])
    if rows and not choice.taken:
        left = ", ".join(f"`{name}` ({why})" for name, why in choice.left_out.items()) or "no string in any row"
        raise InputError(f"{source.path}: no usable field: {left}. Choose fields: --fields FIELD,...")
    texts = zip(rows, texts_of([*rows.values()], choice), strict=True)
    return Evaluation(name, tuple(Item(f"{name}:{number}", each) for number, each in texts), choice)


def _lines(path: str) -> Iterator[bytes]:
    with InputStream(path) as stream:
        pending = b""
        try:
            for block in stream.blocks():
                *lines, pending = (pending + block).split(b"\n")
                yield from lines
        except Damage as damage:
            raise InputError(f"{path}: {damage}. Fetch the file again") from None
        yield pending


def _row(line: bytes, where: str, fields: Sequence[str]) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}). Write one JSON object a line") from None
    try:
        return row_of(record, fields)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _from_lm_eval(names: Sequence[str], task_folder: str | None) -> list[Evaluation]:
    try:
        from lm_eval.tasks import get_task_dict
    except ImportError:
        raise InputError(
            f"--against {', '.join(names)}: not a file, and lm-eval, which defines tasks, is not installed. Install it "
            "(pip install -e '.[eval]'), or name files of JSON lines"
        ) from None
    manager = _task_manager(task_folder)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise InputError(f"--against {', '.join(unknown)}: neither a file nor a task of lm-eval (`lm_eval ls tasks`)")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of every retry
    try:
        return [
            Evaluation(name, _items_of_task(name, task), FieldChoice(["as lm-eval shows them"]))
            for name, task in _tasks(get_task_dict(list(names), manager))
        ]
    except Exception as error:  # whatever the libraries that download a dataset raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise InputError(
            f"--against {', '.join(names)}: lm-eval cannot load the data ({why}). Run this once with a network so that "
            "the Hugging Face cache holds them, or name files of JSON lines"
        ) from None


@cache
def _task_manager(task_folder: str | None) -> Any:
    """Return the manager of lm-eval's own tasks and those in a folder; reading them takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=task_folder)


def _tasks(found: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, task in found.items():
        if isinstance(task, Mapping):  # a group
            yield from _tasks(task)
        else:
            yield str(name), task[1] if isinstance(task, tuple) else task


def _items_of_task(name: str, task: Any) -> tuple[Item, ...]:
    documents = task.test_docs() if task.has_test_docs() else task.validation_docs()
    return tuple(
        Item(f"{name}:{number}", _texts_of_task(task, document)) for number, document in enumerate(documents, start=1)
    )


def _texts_of_task(task: Any, document: Any) -> tuple[str, ...]:
    """Return the question with the right answer, the question alone, and what lm-eval decontaminates by, if anything.

    They are as lm-eval shows them, less `Question:` and `Answer:`.
    """
    context, target = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if task.config.doc_to_choice is not None else None
    if isinstance(context, int) and choices is not None:  # WinoGrande: the contexts differ, the target is common
        context = choices[context]
    elif isinstance(target, int) and choices is not None:
        target = choices[target]
    question = _PROMPT.sub("", str(context)).strip()
    texts = [f"{question} {target}", question]
    if task.should_decontaminate():
        texts.append(str(task.doc_to_decontamination_query(document)))
    return tuple(text for text in dict.fromkeys(texts) if text.strip())
