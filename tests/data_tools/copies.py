"""Corpora with planted copies, and what deduplication makes of them."""

import csv
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cleaning import Corpus, Words, change

LEVELS = (0.0, 0.01, 0.05, 0.1, 0.2)
"""Shares of the words of a copy that are changed."""
Removed = dict[int, int]
"""The position of each removed document, and of the one that is kept in its place."""


def without_origin(texts: list[str]) -> Corpus:
    return Corpus(texts, [None] * len(texts), [None] * len(texts))


def copies(words: Words, choose: random.Random, each: int) -> Corpus:
    texts = [" ".join(words.take(choose.randint(60, 400))) for _ in range(len(LEVELS) * each * 2)]
    planted: list[tuple[str, int | None, Any]] = [(text, None, None) for text in texts]
    originals = iter(choose.sample(range(len(texts)), len(LEVELS) * each))
    for level in LEVELS:
        for original in (next(originals) for _ in range(each)):
            planted.append((change(texts[original], level, words.words, choose), original, level))
    all_texts, origins, how = zip(*planted, strict=True)
    return Corpus(list(all_texts), list(origins), list(how))


def dedup(corpus: Path, folder: Path) -> Removed:
    """Run the command; return what it removed."""
    command = [sys.executable, "-m", "megatron_blackmamba", "data", "dedup", str(corpus), str(folder / "out")]
    subprocess.run([*command, "--workers", "1"], check=True, stdout=subprocess.DEVNULL)
    with open(folder / "out/removed.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {int(row["record"]) - 1: int(row["resembles"].rpartition(":")[2]) - 1 for row in rows}


def pairs_of(text: str) -> set[tuple[str, str]]:
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return set(pairwise(words))


def judged(corpus: Corpus, removed: Removed) -> dict[str, float]:
    """Return shares of the corpus that were removed, removed wrongly, and copies that were found."""
    count = len(corpus.texts)
    similarities = []
    for gone, kept in removed.items():
        one, two = pairs_of(corpus.texts[gone]), pairs_of(corpus.texts[kept])
        similarities.append(len(one & two) / max(1, len(one | two)))
    found = {
        "removed": len(removed) / count,
        "J < 0.5": sum(similarity < 0.5 for similarity in similarities) / count,
    }
    for level in LEVELS:
        planted = [(i, corpus.origin[i]) for i, how in enumerate(corpus.how) if how == level and how is not None]
        if planted:
            found[f"found at {level:.0%}"] = sum(a in removed or b in removed for a, b in planted) / len(planted)
    return found
