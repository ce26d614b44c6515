"""Check the documents of local task data before scoring: lm-eval counts an answer that it cannot read as wrong."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.evaluation.errors import EvaluationError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

Document = dict[str, Any]
Numbered = tuple[str, Document]
"""A document and where it is: its file and line."""
TYPES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


class _Unfit(ValueError):
    """A document that lacks what a task reads; the message says which field, and what to do."""


def checked(task: str, rows: Sequence[Numbered]) -> list[Document]:
    """Return documents with their answers in the type that lm-eval reads; refuse those without an answer."""
    form = _form(task, rows[0][1])
    documents = []
    for where, row in rows:
        try:
            documents.append(row | form(row))
        except _Unfit as error:
            raise EvaluationError(f"{where}: does not fit the task {task}: {error}") from None
    _refuse_mixed_types([(where, document) for (where, _), document in zip(rows, documents, strict=True)])
    return documents


def is_known(task: str) -> bool:
    """Return whether the fields of a task's documents are known here."""
    return task in FORMS


def refuse_wrong_answers(task: "ConfigurableTask", places: Sequence[str] | None, source: str) -> None:
    """Refuse documents of a multiple-choice task whose answer, as lm-eval reads it, is none of the choices.

    places: where each document is, unless the task's preprocessing may drop some.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or callable(task.config.process_results):
        return
    documents = task.eval_docs
    for number, document in enumerate(documents):
        choices = task.doc_to_choice(document)
        gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        if all(_is_choice(one, choices) for one in (gold if isinstance(gold, list) else [gold])):
            continue
        known = places is not None and len(places) == len(documents)
        where = places[number] if places and known else f"{source}, document {number + 1}"
        raise EvaluationError(
            f"{where}: does not fit the task {task.config.task}: its answer is {_shown(gold)}, which is none of the"
            f" {len(choices)} choices. Take a split with answers, or correct it"
        )


def _is_choice(gold: Any, choices: Sequence[str]) -> bool:
    return gold in choices if isinstance(gold, str) else isinstance(gold, int) and 0 <= gold < len(choices)


def _form(task: str, first: Document) -> Callable[[Document], Document]:
    if task == "hellaswag" and "endings" not in first:
        return _hellaswag_processed
    return FORMS.get(task, lambda document: {})


def _piqa(row: Document) -> Document:
    _strings(row, "goal", "sol1", "sol2")
    return {"label": _index(row, "label", 2)}


def _boolq(row: Document) -> Document:
    _strings(row, "passage", "question")
    label = _field(row, "label")
    return {"label": int(label) if isinstance(label, bool) else _index(row, "label", 2)}


def _winogrande(row: Document) -> Document:
    _strings(row, "sentence", "option1", "option2")
    if "_" not in row["sentence"]:
        raise _Unfit("`sentence` has no gap `_`. Correct or remove it")
    return {"answer": str(_index(row, "answer", 2, first=1))}


def _lambada(row: Document) -> Document:
    _strings(row, "text")
    context, _, answer = row["text"].rpartition(" ")
    if not context.strip() or not answer.strip():
        raise _Unfit("the last word of `text`, after a space, is the answer, and there is none. Correct or remove it")
    return {}


def _hellaswag(row: Document) -> Document:
    _strings(row, "activity_label", "ctx_a", "ctx_b")
    return {"label": str(_index(row, "label", len(_listed(row, "endings"))))}


def _hellaswag_processed(row: Document) -> Document:
    _strings(row, "query")
    return {"label": str(_index(row, "label", len(_listed(row, "choices"))))}


def _keyed(question: str, row: Document) -> Document:
    _strings(row, question)
    choices = _field(row, "choices")
    if not isinstance(choices, Mapping):
        raise _Unfit(f"`choices` is {_shown(choices)}, not an object with lists `text` and `label`. Correct it")
    labels = [str(label) for label in _listed(choices, "label", (str, int))]
    if len(_listed(choices, "text")) != len(labels):
        raise _Unfit("the lists `text` and `label` of `choices` differ in length. Correct or remove it")
    key = _field(row, "answerKey")
    if isinstance(key, bool) or labels.count(str(key).strip()) != 1:
        raise _no_answer("answerKey", key, f"one of {', '.join(labels)}")
    return {"answerKey": str(key).strip(), "choices": {**choices, "label": labels}}


FORMS: Mapping[str, Callable[[Document], Document]] = {
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "winogrande": _winogrande,
    "lambada_openai": _lambada,
    "lambada_standard": _lambada,
    "arc_easy": partial(_keyed, "question"),
    "arc_challenge": partial(_keyed, "question"),
    "openbookqa": partial(_keyed, "question_stem"),
    "boolq": _boolq,
}
"""By task, the function that checks a document and returns the fields to replace."""


def _field(row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise _Unfit(f"`{key}` is missing. Use the fields of the data set that lm-eval names for it")
    return row[key]


def _strings(row: Document, *keys: str) -> None:
    for key in keys:
        if not isinstance(_field(row, key), str):
            raise _Unfit(f"`{key}` is {_shown(row[key])}, not a string. Correct or remove it")


def _listed(row: Mapping[str, Any], key: str, types: Any = str) -> Sequence[Any]:
    values = _field(row, key)
    if not isinstance(values, list) or not values or not all(isinstance(value, types) for value in values):
        raise _Unfit(f"`{key}` is {_shown(values)}, not a list of strings. Correct or remove it")
    return values


def _index(row: Document, key: str, choices: int, first: int = 0) -> int:
    """Return the number of the right answer, which may be written as a string or as 1.0."""
    value = _field(row, key)
    written = isinstance(value, str) and value.strip().isascii() and value.strip().isdigit()
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)
    number = int(value) if written or whole else None
    if number is None or not first <= number < first + choices:
        raise _no_answer(key, value, f"a number from {first} to {first + choices - 1}")
    return number


def _no_answer(key: str, value: Any, wanted: str) -> _Unfit:
    return _Unfit(
        f"`{key}` is {_shown(value)}, not {wanted}. Take a split with answers, or correct it: lm-eval would count it as"
        " a wrong answer of the model"
    )


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]


def _refuse_mixed_types(rows: Sequence[Numbered]) -> None:
    """Refuse a field of several types: a table of documents has one per field."""
    seen: dict[str, str] = {}
    for where, document in rows:
        for key, value in document.items():
            name = TYPES.get(type(value))
            if name is not None and seen.setdefault(key, name) != name:
                raise EvaluationError(
                    f"{where}: `{key}` is {_shown(value)}, {name}, and {seen[key]} in a document before it. Correct it"
                )
