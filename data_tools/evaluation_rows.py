"""The texts of a row of an evaluation file: question and right answer of a known format, else the usable fields."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_blackmamba.data_tools.fields import OPTIONAL, FieldError, text_of
from megatron_blackmamba.data_tools.rejects import MISSING_FIELD, InputError

MOST_REPEATS = 10
"""A value that more rows of a file have, such as `none of the above`, identifies no item."""
FEWEST_DISTINCT = 0.1
"""A field with fewer distinct values than this share of the rows is a category."""
_ABOUT_NAMES = (
    "license licence copyright citation author authors source url link id idx index uid hash subject category topic "
    "type kind tag tags split subset config dataset task language lang level difficulty date year version revision"
)
NOT_TEXT = frozenset(_ABOUT_NAMES.split())
"""Names of fields that say something about an item and are no part of it."""
_ABOUT = re.compile(r"_(id|ids|idx|url|hash|date|license|licence|source|type|lang|language)$")


@dataclass(frozen=True)
class Row:
    """The texts of one row, each with the field or fields it is from."""

    texts: tuple[tuple[str, str], ...]
    known: bool
    """The row has the format of a known task, or its fields were chosen: no text of it is left out."""


@dataclass
class FieldChoice:
    """The fields that a file's texts are taken from, those left out, and why."""

    taken: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def row_of(record: Any, fields: Sequence[str] = ()) -> Row:
    """Return the texts of a record. fields: the fields of each text, joined by `+`; without them, by its format."""
    if not isinstance(record, Mapping):
        raise InputError(f"an evaluation item is a JSON object, not {type(record).__name__}")
    if fields:
        known: Sequence[tuple[str, str]] | None = [(name, _chosen_text(record, name)) for name in fields]
    else:
        known = _known(record)
    texts = known if known is not None else tuple(_strings(record))
    return Row(tuple((name, text) for name, text in texts if text.strip()), known is not None)


def choose_fields(rows: Sequence[Row]) -> FieldChoice:
    """Return which fields of a file's rows to use: not those about an item, and not categories."""
    values: dict[str, Counter[str]] = {}
    known: dict[str, None] = {}
    for row in rows:
        for name, text in row.texts:
            if row.known:
                known[name] = None
            else:
                values.setdefault(name, Counter())[text.strip()] += 1
    choice = FieldChoice(list(known))
    for name, counted in values.items():
        last = name.removesuffix("[]").rpartition(".")[2].removesuffix("[]").lower()
        if last in NOT_TEXT or _ABOUT.search(last):
            choice.left_out[name] = "by its name"
        elif counted.total() > 1 and len(counted) <= max(1, FEWEST_DISTINCT * counted.total()):
            choice.left_out[name] = "its values repeat"
        else:
            choice.taken.append(name)
    return choice


def texts_of(rows: Sequence[Row], choice: FieldChoice) -> Iterator[tuple[str, ...]]:
    """Yield the distinct texts of each row in the fields chosen, less the values that many rows have."""
    repeats = Counter(text for row in rows if not row.known for text in {text for _, text in row.texts})
    for row in rows:
        texts = (
            text for name, text in row.texts if row.known or (name in choice.taken and repeats[text] <= MOST_REPEATS)
        )
        yield tuple(dict.fromkeys(texts))


def _chosen_text(record: Mapping[str, Any], names: str) -> str:
    fields = names.split("+")
    try:
        return text_of(fields, " ")(record)
    except FieldError as error:
        if error.reason == MISSING_FIELD and all(field.endswith(OPTIONAL) for field in fields):
            return ""
        raise InputError(f"{error}. Correct --fields, or mark a field that may be missing by a ?") from None


def _known(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    """Return question with right answer, and the question alone. BoolQ's answer is yes or no: nothing to find."""
    keys = record.keys()
    told = record.get("answer", record.get("label"))
    boolean = isinstance(told, bool)
    if told in (0, 1, -1) and not boolean:  # as in SuperGLUE, whose test hides it, or a place in a list of answers
        boolean = not any(isinstance(value, list) for value in record.values())
    if {"passage", "question"} <= keys and boolean:  # BoolQ
        return ("passage", _string(record, "passage")), ("question", _string(record, "question"))
    if {"goal", "sol1", "sol2"} <= keys:  # PIQA
        answer = _chosen(record, "label", {"0": record["sol1"], "1": record["sol2"]})
        return _answered("goal", _string(record, "goal"), answer, [record["sol1"], record["sol2"]])
    if {"sentence", "option1", "option2"} <= keys:  # WinoGrande
        answer = _chosen(record, "answer", {"1": record["option1"], "2": record["option2"]})
        sentence = _string(record, "sentence")
        return ("sentence + right option", sentence.replace("_", answer)), ("sentence", sentence.replace("_", " "))
    if {"ctx", "endings"} <= keys:  # HellaSwag
        texts = _answered("ctx", _string(record, "ctx"), _listed(record, "label", "endings"))
        return tuple((name, _without_marks(text)) for name, text in texts)
    if {"choices", "label"} <= keys and keys & {"query", "ctx"}:  # HellaSwag as lm-eval prepares it
        name = "query" if "query" in keys else "ctx"
        return _answered(name, _string(record, name), _listed(record, "label", "choices"))
    if "answerKey" in keys and isinstance(record.get("question"), Mapping):  # ARC, OpenBookQA as first published
        record = _unnested(record)
        keys = record.keys()
    if {"choices", "answerKey"} <= keys:  # ARC, OpenBookQA
        name = "question" if "question" in keys else "question_stem"
        return _answered(name, _string(record, name), _keyed(record), record["choices"]["text"])
    if {"question", "choices", "answer"} <= keys and isinstance(record["choices"], list):  # MMLU
        letters = {chr(ord("A") + number): text for number, text in enumerate(record["choices"])}
        numbers = {str(number): text for number, text in enumerate(record["choices"])}
        answer = _chosen(record, "answer", letters | numbers)
        return _answered("question", _string(record, "question"), answer, record["choices"])
    return None


def _answered(name: str, question: str, answer: str, answers: Sequence[Any] = ()) -> tuple[tuple[str, str], ...]:
    """Return question with right answer, the question alone, and with all answers, as a row of the data set has it."""
    texts = [(f"{name} + right answer", f"{question} {answer}"), (name, question)]
    if answers:
        texts.append((f"{name} + all answers", " ".join([question, *map(str, answers)])))
    return tuple(texts)


def _without_marks(text: str) -> str:
    """Remove the marks of HellaSwag, which no page shows."""
    return " ".join(re.sub(r"\[(header|title|step|substeps)\]", " ", text).split())


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


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a record with its path; refuse a `text` of another type."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        if not name and "text" in value:
            _string(value, "text")
        for key, inner in value.items():
            yield from _strings(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, f"{name}[]")
