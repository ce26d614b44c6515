"""The texts of evaluation items: from lm-eval's task definitions, or from local files."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.sources import find_sources
from megatron_blackmamba.data_tools.streams import InputStream

PAPER_TASKS = (
    *("hellaswag", "piqa", "winogrande", "lambada_openai"),
    *("arc_easy", "arc_challenge", "openbookqa", "boolq"),
)


@dataclass(frozen=True)
class Item:
    """One evaluation item and the texts by which it is recognised, the answer included."""

    name: str
    texts: tuple[str, ...]


def read_items(against: Sequence[str], task_folder: str | None = None) -> list[Item]:
    """Return the items of tasks and files. A name that is no file is one of lm-eval's tasks.

    task_folder: a folder with your own task definitions, as lm-eval's --include_path.
    """
    files = [name for name in against if Path(name).exists()]
    tasks = [name for name in against if name not in files]
    items = [item for name in files for item in _from_file(name)]
    if tasks:
        items += _from_lm_eval(tasks, task_folder)
    if not items:
        raise InputError(f"--against {', '.join(against)}: no item found")
    return items


def contents_of(items: Sequence[Item]) -> dict[str, str]:
    """Return the sha256 of the texts of every file or task, by which a change of them is noticed."""
    hashes: dict[str, Any] = {}
    for item in items:
        source, _, number = item.name.rpartition(":")
        line = json.dumps([number, item.texts]).encode()
        hashes.setdefault(f"contents of {source}", hashlib.sha256()).update(line)
    return {source: found.hexdigest() for source, found in hashes.items()}


def _from_file(path: str) -> Iterator[Item]:
    for source in find_sources([path]).sources:
        if source.format != "jsonl":
            raise InputError(f"{source.path}: evaluation items must be JSON Lines. Convert the file")
        for number, record in enumerate(_records(source.path), start=1):
            yield Item(f"{source.name}:{number}", texts_of(record))


def _records(path: str) -> Iterator[Any]:
    with InputStream(path) as stream:
        pending = b""
        for block in stream.blocks():
            *lines, pending = (pending + block).split(b"\n")
            yield from (json.loads(line) for line in lines if line.strip())
        if pending.strip():
            yield json.loads(pending)


def texts_of(record: Any) -> tuple[str, ...]:
    """Return the texts of a record of a task whose fields are known; else each of its strings."""
    if not isinstance(record, Mapping):
        raise InputError(f"an evaluation item is a JSON object, not {type(record).__name__}")
    known = _known(record)
    return tuple(text for text in (known or tuple(_strings(record))) if text.strip())


def _known(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return question and right answer as a page would show them. BoolQ's answer is yes or no: nothing to find."""
    keys = record.keys()
    if "text" in keys:  # LAMBADA, and plain text
        return (record["text"],)
    if {"passage", "question"} <= keys:  # BoolQ
        return record["passage"], record["question"]
    if {"goal", "sol1", "sol2", "label"} <= keys:  # PIQA
        return (f"{record['goal']} {record[('sol1', 'sol2')[int(record['label'])]]}",)
    if {"sentence", "option1", "option2", "answer"} <= keys:  # WinoGrande
        answer = record[f"option{record['answer']}"]
        return (record["sentence"].replace("_", answer),)
    if {"choices", "label"} <= keys and isinstance(record["choices"], list):  # HellaSwag
        return (f"{record.get('query', record.get('ctx', ''))} {record['choices'][int(record['label'])]}",)
    if {"choices", "answerKey"} <= keys:  # ARC, OpenBookQA
        choices = record["choices"]
        answer = choices["text"][choices["label"].index(record["answerKey"])]
        return (f"{record.get('question', record.get('question_stem', ''))} {answer}",)
    return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _from_lm_eval(names: Sequence[str], task_folder: str | None) -> list[Item]:
    try:
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError:
        raise InputError(
            f"--against {', '.join(names)}: not a file, and lm-eval, which defines tasks, is not installed. Install it "
            "(pip install 'megatron-blackmamba[eval]'), or name files of JSON lines"
        ) from None
    manager = TaskManager(include_path=task_folder)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise InputError(f"--against {', '.join(unknown)}: neither a file nor a task of lm-eval (`lm_eval ls tasks`)")
    return [
        Item(f"{name}:{number}", _texts_of_task(task, document))
        for name, task in _tasks(get_task_dict(list(names), manager))
        for number, document in enumerate(_documents(task), start=1)
    ]


def _tasks(found: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, task in found.items():
        if isinstance(task, Mapping):  # a group
            yield from _tasks(task)
        else:
            yield str(name), task[1] if isinstance(task, tuple) else task


def _documents(task: Any) -> Any:
    return task.test_docs() if task.has_test_docs() else task.validation_docs()


def _texts_of_task(task: Any, document: Any) -> tuple[str, ...]:
    """Return what lm-eval would show and the right answer, and the text that it decontaminates by, if it has one."""
    context, target = task.doc_to_text(document), task.doc_to_target(document)
    choices = task.doc_to_choice(document) if task.config.doc_to_choice is not None else None
    if isinstance(context, int) and choices is not None:  # WinoGrande: the contexts differ, the target is common
        context = choices[context]
    elif isinstance(target, int) and choices is not None:
        target = choices[target]
    texts = [f"{context} {target}"]
    if task.should_decontaminate():
        texts.append(str(task.doc_to_decontamination_query(document)))
    return tuple(dict.fromkeys(texts))
