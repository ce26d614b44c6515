"""The texts of evaluation items: from lm-eval's task definitions, or from local files."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.sources import find_sources
from megatron_blackmamba.data_tools.streams import Damage, InputStream


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
        for number, line in enumerate(_lines(source.path), start=1):
            if line.strip():
                yield Item(f"{source.name}:{number}", _texts_of_line(line, f"{source.path}, line {number}"))


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


def _texts_of_line(line: bytes, where: str) -> tuple[str, ...]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}). Write one JSON object a line") from None
    try:
        return texts_of(record)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


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
        return (_string(record, "text"),)
    if {"passage", "question"} <= keys:  # BoolQ
        return _string(record, "passage"), _string(record, "question")
    if {"goal", "sol1", "sol2"} <= keys:  # PIQA
        return (f"{_string(record, 'goal')} {_chosen(record, 'label', {'0': record['sol1'], '1': record['sol2']})}",)
    if {"sentence", "option1", "option2"} <= keys:  # WinoGrande
        answer = _chosen(record, "answer", {"1": record["option1"], "2": record["option2"]})
        return (_string(record, "sentence").replace("_", answer),)
    if {"ctx", "endings"} <= keys:  # HellaSwag
        shown = f"{_string(record, 'ctx')} {_listed(record, 'label', 'endings')}"
        shown = re.sub(r"\[(header|title|step|substeps)\]", " ", shown)  # marks, which no page shows
        return (" ".join(shown.split()),)
    if {"choices", "label"} <= keys and keys & {"query", "ctx"}:  # HellaSwag as lm-eval prepares it
        question = _string(record, "query" if "query" in keys else "ctx")
        return (f"{question} {_listed(record, 'label', 'choices')}",)
    if "answerKey" in keys and isinstance(record.get("question"), Mapping):  # ARC, OpenBookQA as first published
        record = _unnested(record)
        keys = record.keys()
    if {"choices", "answerKey"} <= keys:  # ARC, OpenBookQA
        question = _string(record, "question" if "question" in keys else "question_stem")
        return (f"{question} {_keyed(record)}",)
    return None


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise InputError(f"`{key}` is {json.dumps(value)[:60]}, not a string. Correct or remove the line")
    return value


def _listed(record: Mapping[str, Any], key: str, answers: str) -> str:
    """Return the item of the list `answers` whose place, counted from 0, stands in the field `key`."""
    texts = record[answers]
    if not isinstance(texts, list):
        raise InputError(f"`{answers}` is {json.dumps(texts)[:60]}, not a list. Correct or remove the line")
    return _chosen(record, key, {str(number): text for number, text in enumerate(texts)})


def _unnested(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an ARC or OpenBookQA record of the authors' files in the form of the Hugging Face Hub."""
    question = record["question"]
    try:
        choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
    except (KeyError, TypeError):
        raise InputError("`question` has no list `choices` of `text` and `label`. Correct or remove the line") from None
    return {"question_stem": question.get("stem"), "choices": choices, "answerKey": record["answerKey"]}


def _keyed(record: Mapping[str, Any]) -> str:
    choices = record["choices"]
    try:
        named = dict(zip(choices["label"], choices["text"], strict=True))
    except (KeyError, TypeError, ValueError):
        raise InputError(
            "`choices` has no lists `text` and `label` of one length. Correct or remove the line"
        ) from None
    return _chosen(record, "answerKey", named)


def _chosen(record: Mapping[str, Any], key: str, answers: Mapping[str, Any]) -> str:
    """Return the right one of `answers`, which the field `key` names."""
    named = record.get(key)
    answer = answers.get(str(named))
    if not isinstance(answer, str):
        raise InputError(
            f"`{key}` is {json.dumps(named)[:60]}, which names no answer. Take a split with answers, or remove the line"
        )
    return answer


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
        from lm_eval.tasks import get_task_dict
    except ImportError:
        raise InputError(
            f"--against {', '.join(names)}: not a file, and lm-eval, which defines tasks, is not installed. Install it "
            "(pip install 'megatron-blackmamba[eval]'), or name files of JSON lines"
        ) from None
    manager = _task_manager(task_folder)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise InputError(f"--against {', '.join(unknown)}: neither a file nor a task of lm-eval (`lm_eval ls tasks`)")
    return [
        Item(f"{name}:{number}", _texts_of_task(task, document))
        for name, task in _tasks(get_task_dict(list(names), manager))
        for number, document in enumerate(task.test_docs() if task.has_test_docs() else task.validation_docs(), start=1)
    ]


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
