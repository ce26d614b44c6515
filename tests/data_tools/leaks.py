"""Evaluation items in the forms in which they leak.

plain       question and right answer in one line
raw row     the line of the evaluation file
question    the question alone
zero-width  U+200B within words and between them, and soft hyphens
numbered    wrapped, each line begins with its number
comment     wrapped, each line begins with `#`, `//`, `>` or `*`
changed     one word in ten replaced, and at least one
first 60%   the first 60% of the words of `plain`
"""

import json
import random
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cleaning import change
from megatron_blackmamba.data_tools.evaluation_rows import row_of
from megatron_blackmamba.data_tools.words import COMMON

FORMS = ("plain", "raw row", "question", "zero-width", "numbered", "comment", "changed", "first 60%")
INVISIBLE = "\u200b\u00ad\u2060"


@dataclass(frozen=True)
class Planted:
    """An item of a task as its file has it, and as a page shows it."""

    task: str
    row: str
    plain: str
    question: str


def generated(count: int, choose: random.Random) -> Iterator[Planted]:
    """Yield items of random words, in the forms and lengths of five tasks."""
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er", "ol")]
    rare = ["".join(choose.choices(syllables, k=choose.choice((2, 2, 3)))) for _ in range(3000)]
    common = COMMON[:40]

    def text(least: int, most: int) -> str:
        length = choose.randint(least, most)
        return " ".join(choose.choice(rare if choose.random() < 0.45 else common) for _ in range(length))

    for _ in range(count):
        question, answers = text(7, 12), [text(1, 4) for _ in range(4)]
        choices = {"text": answers, "label": list("ABCD")}
        yield _planted("short choice", {"question_stem": question, "choices": choices, "answerKey": "B"})
        question, answers = text(5, 12), [text(10, 25), text(10, 25)]
        yield _planted("procedure", {"goal": question, "sol1": answers[0], "sol2": answers[1], "label": 1})
        row = {"question": text(12, 40), "choices": [text(1, 8) for _ in range(4)], "answer": 2, "subject": "x"}
        yield _planted("mmlu", row)
        yield _planted("passage", {"text": text(60, 100)})
        question = " ".join(f"{text(4, 9)} {choose.randint(2, 900)}" for _ in range(4))
        yield _planted("arithmetic", {"question": f"{question} {text(3, 6)}?", "answer": f"{text(4, 9)} 1{text(4, 8)}"})


def _planted(task: str, row: dict[str, Any]) -> Planted:
    texts = [text for _, text in row_of(row).texts]
    if "passage" in row or task == "arithmetic":  # BoolQ: its question is nothing without the passage
        texts = [" ".join(texts), texts[0]]
    return Planted(task, json.dumps(row), texts[0], texts[:2][-1])


def in_form(item: Planted, form: str, vocabulary: Sequence[str], choose: random.Random) -> str:
    """Return an item as it leaks."""
    words = item.plain.split()
    wrapped = textwrap.wrap(item.plain, choose.choice((50, 70, 90)))
    if form == "raw row":
        return item.row
    if form == "question":
        return item.question
    if form == "zero-width":
        return " ".join(f"\u200b{word[:2]}{choose.choice(INVISIBLE)}{word[2:]}" for word in words)
    if form == "numbered":
        mark = choose.choice((". ", ") ", ": ", "\t"))
        return "\n".join(f"{number}{mark}{line}" for number, line in enumerate(wrapped, start=choose.randint(1, 90)))
    if form == "comment":
        mark = choose.choice(("# ", "// ", "> ", " * "))
        return "\n".join(mark + line for line in wrapped)
    if form == "changed":
        return change(" ".join(words), max(0.1, 0.51 / len(words)), vocabulary, choose)
    if form == "first 60%":
        return " ".join(words[: max(1, round(0.6 * len(words)))])
    return item.plain


def plant(items: Sequence[Planted], hosts: Sequence[str], choose: random.Random) -> tuple[list[str], list[Any]]:
    """Return documents with an item in their middle, and for each its task, form, and where the item is."""
    vocabulary = sorted({word for text in hosts[:200] for word in text.split()})
    texts, planted = [], []
    for item in items:
        for form in FORMS:
            host, text = choose.choice(hosts)[:3000], in_form(item, form, vocabulary, choose)
            middle = len(host) // 2
            texts.append(f"{host[:middle]}\n\n{text}\n\n{host[middle:]}")
            planted.append((item.task, form, middle + 2, middle + 2 + len(text)))
    return texts, planted


def recall(planted: Sequence[Any], found: Any) -> dict[str, dict[str, float]]:
    """Return the share found by task and form. found: from a document and where its item is, to whether it is found."""
    counts: Counter[tuple[str, str]] = Counter()
    hits: Counter[tuple[str, str]] = Counter()
    for number, (task, form, begin, end) in enumerate(planted):
        for name in (task, "all"):
            counts[name, form] += 1
            hits[name, form] += found(number, begin, end)
    tasks = dict.fromkeys(task for task, _ in counts)
    return {task: {form: hits[task, form] / counts[task, form] for form in FORMS} for task in tasks}
