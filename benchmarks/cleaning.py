"""Quality and speed of `data dedup` and `data decontaminate` on text with planted copies and evaluation items.

    python -m benchmarks.cleaning FILE.jsonl... --against FILE... [--documents 3000] [--json]

The texts of the files are cut into documents of 60 to 400 words. Copies of some documents are planted with 5, 10, 20
and 40% of their words changed. Others get an evaluation item in their middle: verbatim, re-cased, re-spaced, or cut to
its first 60%.

recall      planted copies that are not kept beside their original; planted items whose document is removed
precision   removed documents that were planted (the copy or its original), or resemble another one: the Jaccard
            similarity of their word n-grams is at least 0.5, computed for all pairs
speed       megabytes of text per CPU-second and the memory of the process; tasks of more --workers are not counted
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

from megatron_blackmamba.data_tools.evaluation_items import Item, read_items

LEVELS = (0.05, 0.1, 0.2, 0.4)
FORMS = ("verbatim", "re-cased", "re-spaced", "cut")
SIMILAR = 0.5
PLANTED_EACH = 10
"""One document in this many is planted, for each level and each form."""


@dataclass(frozen=True)
class Corpus:
    """Texts; for each the text that it was made from, and how."""

    texts: list[str]
    origin: list[int | None]
    how: list[float | str | None]

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in self.texts))
        return path


class Words:
    """Random words, of which some are common."""

    def __init__(self, choose: random.Random, count: int = 20_000) -> None:
        self.choose = choose
        self.words = ["".join(choose.choices(ascii_lowercase, k=choose.randint(2, 9))) for _ in range(count)]
        self.weights = list(accumulate(1 / (rank + 20) for rank in range(count)))

    def take(self, count: int) -> list[str]:
        return self.choose.choices(self.words, cum_weights=self.weights, k=count)

    def lines(self, count: int) -> str:
        """Return words in lines of ten."""
        words = self.take(count)
        return "\n".join(" ".join(words[start : start + 10]) for start in range(0, count, 10))


def documents_of(texts: Iterable[str], count: int, choose: random.Random) -> list[str]:
    """Cut texts into documents of 60 to 400 words."""
    documents: list[str] = []
    for text in texts:
        words = text.split(" ")
        while len(words) >= 60 and len(documents) < count:
            length = choose.randint(60, 400)
            documents.append(" ".join(words[:length]))
            words = words[length:]
    return documents[:count]


def change(text: str, share: float, vocabulary: Sequence[str], choose: random.Random) -> str:
    """Replace a share of a text's words by others."""
    words = text.split(" ")
    for place in choose.sample(range(len(words)), round(share * len(words))):
        words[place] = choose.choice(vocabulary)
    return " ".join(words)


def plant_copies(documents: Sequence[str], choose: random.Random) -> Corpus:
    """Add a changed copy of some documents; every level of change has documents of its own."""
    vocabulary = sorted({word for text in documents[:200] for word in text.split(" ") if word})
    planted: list[tuple[str, int | None, Any]] = [(text, None, None) for text in documents]
    originals = iter(choose.sample(range(len(documents)), len(LEVELS) * (len(documents) // PLANTED_EACH)))
    for level in LEVELS:
        for _ in range(len(documents) // PLANTED_EACH):
            original = next(originals)
            planted.append((change(documents[original], level, vocabulary, choose), original, level))
    texts, origins, how = zip(*planted, strict=True)
    return Corpus(list(texts), list(origins), list(how))


def plant_items(documents: Sequence[str], items: Sequence[Item], choose: random.Random) -> Corpus:
    """Put an item into the middle of some documents."""
    texts, how = list(documents), [None] * len(documents)
    places = iter(choose.sample(range(len(documents)), len(FORMS) * (len(documents) // PLANTED_EACH)))
    for form in FORMS:
        for _ in range(len(documents) // PLANTED_EACH):
            place = next(places)
            words = texts[place].split(" ")
            item = " ".join(choose.choice(items).texts)
            texts[place] = " ".join([*words[:30], _in_form(item, form, choose), *words[30:]])
            how[place] = form  # type: ignore[call-overload]
    return Corpus(texts, [None] * len(texts), how)


def _in_form(text: str, form: str, choose: random.Random) -> str:
    if form == "re-cased":
        return text.swapcase()
    if form == "re-spaced":
        return "".join(word + choose.choice(["  ", "\n", " \t", "\n\n"]) for word in text.split())
    if form == "cut":
        words = text.split()
        return " ".join(words[: max(1, round(0.6 * len(words)))])
    return text


def most_similar(texts: Sequence[str], n_grams: int) -> np.ndarray:
    """Return the largest Jaccard similarity of every text with another one, from all pairs."""
    grams = [_grams(text, n_grams) for text in texts]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, found in enumerate(grams):
        for gram in found:
            holders[gram].append(number)
    arrays = {gram: np.array(numbers) for gram, numbers in holders.items() if len(numbers) > 1}
    sizes = np.array([len(found) for found in grams])
    best = np.zeros(len(texts))
    for number, found in enumerate(grams):
        shared = [arrays[gram] for gram in found if gram in arrays]
        if shared:
            common = np.bincount(np.concatenate(shared), minlength=len(texts)).astype(float)
            common[number] = 0
            best[number] = (common / (sizes + sizes[number] - common)).max()
    return best


def _grams(text: str, n_grams: int) -> set[str]:
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return {" ".join(words[i : i + n_grams]) for i in range(len(words) - n_grams + 1)}


def copies_found(corpus: Corpus, removed: set[int], n_grams: int = 2) -> dict[str, float]:
    """Return recall by level of change, and precision. removed: positions in the corpus."""
    found: dict[str, float] = {}
    for level in LEVELS:
        pairs = [(i, corpus.origin[i]) for i, how in enumerate(corpus.how) if how == level]
        found[f"recall at {level:.0%}"] = sum(a in removed or b in removed for a, b in pairs) / len(pairs)
    planted = {i for i, origin in enumerate(corpus.origin) if origin is not None} | {*corpus.origin}
    similar = most_similar(corpus.texts, n_grams)
    right = sum(i in planted or similar[i] >= SIMILAR for i in removed)
    return {**found, "precision": right / max(1, len(removed)), "removed": len(removed)}


def items_found(corpus: Corpus, removed: set[int]) -> dict[str, float]:
    """Return recall by form of the item, and how many documents without a planted item were removed."""
    found: dict[str, float] = {}
    for form in FORMS:
        held = [i for i, how in enumerate(corpus.how) if how == form]
        found[f"recall, {form}"] = sum(i in removed for i in held) / len(held)
    others = sum(corpus.how[i] is None for i in removed)
    return {**found, "removed without a planted item": others, "removed": len(removed)}


def removed_records(out_dir: Path) -> set[int]:
    """Return the positions of the removed documents of a corpus in one file."""
    lines = (out_dir / "removed.tsv").read_text().splitlines()[1:]
    return {int(line.split("\t")[1]) - 1 for line in lines}


def run(verb: str, *arguments: Any) -> dict[str, float]:
    """Run the command; return its CPU seconds and the memory of its largest process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.monotonic()
    command = [sys.executable, "-m", "megatron_blackmamba", "data", verb, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.monotonic() - begun, "cpu_seconds": cpu, "gb_of_a_process": after.ru_maxrss / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path, help="JSON lines with a field `text`")
    parser.add_argument("--against", nargs="+", required=True, help="files of evaluation items")
    parser.add_argument("--documents", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    choose = random.Random(0)
    texts = [json.loads(line)["text"] for path in arguments.inputs for line in path.open()]
    documents = documents_of(texts, arguments.documents, choose)
    items = read_items(arguments.against)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="cleaning_") as name:
        folder, workers = Path(name), ("--workers", arguments.workers)
        copies = plant_copies(documents, choose)
        cost = run("dedup", copies.write(folder / "copies.jsonl"), folder / "dedup", *workers)
        results["dedup"] = {**copies_found(copies, removed_records(folder / "dedup")), **cost}
        held = plant_items(documents, items, choose)
        against = [word for path in arguments.against for word in ("--against", path)]
        cost = run("decontaminate", held.write(folder / "held.jsonl"), folder / "decon", *against, *workers)
        results["decontaminate"] = {**items_found(held, removed_records(folder / "decon")), **cost}
    for verb, figures in results.items():
        corpus = copies if verb == "dedup" else held
        figures["mb_per_cpu_second"] = sum(map(len, corpus.texts)) / 1e6 / figures["cpu_seconds"]
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for verb, figures in results.items():
        print(f"{verb}, {len(documents)} documents")
        for figure, value in figures.items():
            print(f"    {figure}: {value:.3g}" if value < 1 or value != int(value) else f"    {figure}: {value:.0f}")


if __name__ == "__main__":
    main()
