"""Recall of `data decontaminate` by task and by the form in which items leak, and what it takes from real documents.

    python -m benchmarks.decontamination_forms [--against FILE...] [--items 100] [--documents 6000] [--json]

Items are planted in the middle of real documents of this Python installation: of its standard library, the packages
and their documentation. The items are generated, the same on every machine; with --against, those of your files are
added. Each form is planted in other documents, and is found if a passage of it is cut, or the document is removed.

plain       question and right answer in one line
raw row     the line of the evaluation file
question    the question alone
zero-width  U+200B within words and between them, and soft hyphens
numbered    wrapped, each line begins with its number
comment     wrapped, each line begins with `#`, `//`, `>` or `*`
changed     one word in ten replaced, and at least one
first 60%   the first 60% of the words of `plain`

datatrove   the same documents through datatrove's NGramsDecontFilter: its defaults, and question n-grams too
real        documents without a planted item: how many lost a passage, with --show to read them
"""

import argparse
import csv
import gzip
import importlib.metadata
import json
import random
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cleaning import change, run
from megatron_blackmamba.data_tools.evaluation_rows import row_of
from megatron_blackmamba.data_tools.words import COMMON

FORMS = ("plain", "raw row", "question", "zero-width", "numbered", "comment", "changed", "first 60%")
INVISIBLE = "\u200b\u00ad\u2060"
SUFFIXES = {".py", ".md", ".rst", ".txt", ".html"}


@dataclass(frozen=True)
class Planted:
    """An item of a task as its file has it, and as a page shows it."""

    task: str
    row: str
    plain: str
    question: str


def real_documents(count: int, choose: random.Random) -> list[str]:
    """Return distinct texts of this Python installation, of 400 to 20,000 characters."""
    paths = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")}
    files = sorted({path for folder in paths for path in folder.rglob("*") if path.suffix in SUFFIXES})
    choose.shuffle(files)
    texts: dict[str, None] = {}
    for text in _texts(files):
        if 400 <= len(text) <= 20_000:
            texts[text] = None
        if len(texts) == count:
            break
    return list(texts)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for package in importlib.metadata.distributions():
        yield (package.read_text("METADATA") or "").partition("\n\n")[2]
    for path in files:
        try:
            yield path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue


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


def from_files(paths: Sequence[Path], count: int, choose: random.Random) -> Iterator[Planted]:
    """Yield random items of evaluation files."""
    for path in paths:
        read = gzip.decompress if path.suffix == ".gz" else bytes
        lines = [line for line in read(path.read_bytes()).decode().splitlines() if line.strip()]
        for line in choose.sample(lines, min(count, len(lines))):
            yield _planted(path.name.split(".")[0], json.loads(line))


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


def found_in(out_dir: Path) -> dict[int, list[tuple[int, int]]]:
    """Return the passages that were cut, by the position of the document; all of it if it was removed."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    with open(out_dir / "removed.tsv", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            begin, _, end = row["detail"].partition(":")[0].removeprefix("characters ").partition("-")
            found[int(row["record"]) - 1].append((int(begin), int(end)))
    return found


def by_datatrove(items: Sequence[Planted], texts: Sequence[str], *, whole: bool) -> tuple[set[int], float]:
    """Return the documents that datatrove's filter removes, and its CPU seconds."""
    from datatrove.data import Document
    from datatrove.pipeline.decont import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer

    from megatron_blackmamba.data_tools.splitters import SpacedWords

    with tempfile.TemporaryDirectory() as name:
        config = NGramsDecontConfig(find_query_ngrams=whole)
        maker: Any = object.__new__(NGramsDecontIndexer)  # its constructor wants lighteval, which it needs for tasks
        drop = NGramsDecontFilter(name, config, language=SpacedWords())
        maker.config, maker.tokenizer, maker.hash_func = config, drop.tokenizer, drop.hash_func
        hashes: dict[int, str] = {}
        for item in items:
            follows = item.plain != item.question and item.plain.startswith(item.question)
            answer, question = (item.plain[len(item.question) :], item.question) if follows else (item.plain, "")
            hashes |= dict.fromkeys(maker.compute_hashes(answer, question), "task")
        drop._index_hashes = hashes
        begun = time.process_time()
        removed = {i for i, text in enumerate(texts) if drop.filter(Document(text=text, id=str(i))) is not True}
        return removed, time.process_time() - begun


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


def show(title: str, shares: dict[str, dict[str, float]]) -> None:
    print(f"\n| {title} | " + " | ".join(FORMS) + " |")
    print("|---|" + "---|" * len(FORMS))
    for task, by_form in sorted(shares.items(), key=lambda each: each[0] == "all"):
        print(f"| {task} | " + " | ".join(f"{100 * by_form[form]:.1f}%" for form in FORMS) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", nargs="+", type=Path, default=[], help="evaluation files to add")
    parser.add_argument("--items", type=int, default=100, help="of each task")
    parser.add_argument("--documents", type=int, default=6000, help="without an item")
    parser.add_argument("--show", type=int, default=10, help="passages to print that real documents lost")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    choose = random.Random(0)
    real = real_documents(arguments.documents, choose)
    made = list(generated(arguments.items, choose))
    items = [*made, *from_files(arguments.against, arguments.items, choose)]
    texts, planted = plant(items, real, choose)
    with tempfile.TemporaryDirectory(prefix="forms_") as name:
        folder = Path(name)
        for task in dict.fromkeys(item.task for item in made):
            rows = [item.row for item in made if item.task == task]
            (folder / f"{task.replace(' ', '_')}.jsonl").write_text("\n".join(rows))
        files = [*folder.glob("*.jsonl"), *arguments.against]
        against = [word for path in files for word in ("--against", path)]
        results: dict[str, Any] = {}
        outs = {}
        for kind, documents in (("planted", texts), ("real", real)):
            corpus, outs[kind] = folder / kind / "in.jsonl", folder / kind / "out"
            corpus.parent.mkdir()
            corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
            cost = run("decontaminate", corpus, outs[kind], *against, "--workers", 1)
            results[kind] = {"documents": len(documents), "mb": sum(map(len, documents)) / 1e6, **cost}
        cuts, lost = found_in(outs["planted"]), found_in(outs["real"])
        with open(outs["real"] / "removed.tsv", newline="") as file:
            rows_lost = list(csv.DictReader(file, delimiter="\t"))
    forms = recall(planted, lambda n, begin, end: any(a < end and begin < b for a, b in cuts.get(n, ())))
    others: dict[str, Any] = {}
    for title, whole in (("datatrove, defaults", False), ("datatrove, question n-grams too", True)):
        removed, seconds = by_datatrove(items, [*texts, *real], whole=whole)
        others[title] = recall(planted, lambda n, *_, removed=removed: n in removed)
        results[title] = {"real documents removed": sum(n >= len(texts) for n in removed), "cpu_seconds": seconds}
    results["real"]["documents with a cut"] = len(lost)
    if arguments.json:
        json.dump({"forms": forms, **results, "others": others}, sys.stdout, indent=2)
        return
    show("found", forms)
    for title, shares in others.items():
        show(title, shares)
    for title, figures in results.items():
        print(f"\n{title}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    for row in rows_lost[: arguments.show]:
        print(f"lost from a real document: {row['resembles']}: {row['detail'][:300]}")


if __name__ == "__main__":
    main()
