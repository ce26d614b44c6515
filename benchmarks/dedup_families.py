"""Removals of deduplication from families of different documents, and the copies that it finds, beside datatrove.

    python -m benchmarks.dedup_families [--pages 1000] [--functions 4000] [--similarity 0.6] [--json]

Each family is a corpus of its own, made on this machine:

pages       different texts between the same navigation, which is 35, 50, 60 or 85% of each page
code        different programs under the MIT licence's header
functions   the functions of the Python standard library that runs this
copies      documents of 60 to 400 words; copies have 0, 1, 5, 10 or 20% of their words changed

J is the Jaccard similarity of the word pairs of a removed document and of the one that is kept in its place. Removed
with J < 0.5 is wrong; with J < 0.3 nothing is in common but boilerplate. datatrove runs with its defaults (5-grams,
14 buckets of 8 hashes) and with ours (2-grams, 60 buckets of 7 hashes), split at spaces. CPU seconds count all
processes, with their start.
"""

import argparse
import ast
import csv
import json
import multiprocessing
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.cleaning import Corpus, change

LEVELS = (0.0, 0.01, 0.05, 0.1, 0.2)
NAVIGATION = (0.35, 0.5, 0.6, 0.85)
PAGE_WORDS = 300
COPIES_EACH = 200
LICENCE = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the
Software, and to permit persons to whom the Software is furnished to do so, subject to the following
conditions: The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS
OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE
AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR
OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION
WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""

Removed = dict[int, int]
"""The position of each removed document, and of the one that is kept in its place."""


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


def families(pages: int, functions: int) -> Iterator[tuple[str, Corpus]]:
    """Yield the families by name."""
    choose = random.Random(0)
    words = Words(choose)
    for share in NAVIGATION:
        navigation = words.lines(round(share * PAGE_WORDS))
        texts = [f"{navigation}\n{words.lines(round((1 - share) * PAGE_WORDS))}" for _ in range(pages)]
        yield f"pages, {share:.0%} common", _without_origin(texts)
    yield "code, one licence", _without_origin([f"{LICENCE}\n{_program(words)}" for _ in range(pages)])
    yield "Python functions", _without_origin(_functions(functions))
    yield "copies", _copies(words, choose)


def _without_origin(texts: list[str]) -> Corpus:
    return Corpus(texts, [None] * len(texts), [None] * len(texts))


def _program(words: Words) -> str:
    lines = []
    for _ in range(words.choose.randint(5, 25)):
        name, one, two = words.take(3)
        lines.append(f"def {name}({one}):\n    {two} = {one}.{words.take(1)[0]}()\n    return {two}\n")
    return "\n".join(lines)


def _functions(most: int) -> list[str]:
    """Return functions of the standard library with 20 words or more, each text once."""
    found: dict[str, None] = {}
    for path in sorted(Path(os.__file__).parent.glob("*.py")) + sorted(Path(os.__file__).parent.glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                source = ast.get_source_segment(text, node) or ""
                if len(source.split()) >= 20:
                    found[source] = None
    texts = list(found)
    random.Random(1).shuffle(texts)
    return texts[:most]


def _copies(words: Words, choose: random.Random, each: int = COPIES_EACH) -> Corpus:
    texts = [" ".join(words.take(choose.randint(60, 400))) for _ in range(len(LEVELS) * each * 2)]
    planted: list[tuple[str, int | None, Any]] = [(text, None, None) for text in texts]
    originals = iter(choose.sample(range(len(texts)), len(LEVELS) * each))
    for level in LEVELS:
        for original in (next(originals) for _ in range(each)):
            planted.append((change(texts[original], level, words.words, choose), original, level))
    all_texts, origins, how = zip(*planted, strict=True)
    return Corpus(list(all_texts), list(origins), list(how))


def ours(corpus: Path, folder: Path, *options: str) -> Removed:
    """Run the command; return what it removed."""
    command = [sys.executable, "-m", "megatron_blackmamba", "data", "dedup", str(corpus), str(folder / "out"), *options]
    subprocess.run([*command, "--workers", "1"], check=True, stdout=subprocess.DEVNULL)
    with open(folder / "out/removed.tsv", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {int(row["record"]) - 1: int(row["resembles"].rpartition(":")[2]) - 1 for row in rows}


def datatroves(corpus: Path, folder: Path, *parameters: int) -> Removed:
    """Run datatrove's stages in a process; return what its last stage would remove, by its clusters."""
    process = multiprocessing.get_context("spawn").Process(target=_datatrove, args=(corpus, folder, *parameters))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"datatrove ended with {process.exitcode}")
    removed, clusters = (
        (folder / f"clusters/000000.{kind}").read_bytes() if (folder / f"clusters/000000.{kind}").exists() else b""
        for kind in ("remove", "clusters")
    )
    gone = {number for (number,) in struct.iter_unpack("<I", removed)}
    members = list(struct.iter_unpack("<II", clusters))
    kept = {cluster: number for number, cluster in members if number not in gone}
    return {number: kept[cluster] for number, cluster in members if number in gone}


def _datatrove(corpus: Path, folder: Path, *parameters: int) -> None:
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.utils.hashing import HashConfig
    from loguru import logger

    from megatron_blackmamba.data_tools.splitters import SpacedWords

    logger.remove()
    config = MinhashConfig(*parameters, hash_config=HashConfig(precision=32)) if parameters else MinhashConfig()
    signatures, pairs, clusters = (str(folder / name) for name in ("signatures", "pairs", "clusters"))
    documents = JsonlReader(str(corpus.parent), glob_pattern=corpus.name).run()
    language: Any = SpacedWords()
    MinhashDedupSignature(signatures, config, language).run(documents, 0, 1)
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(signatures, pairs, config=config, lines_to_buffer=1000).run(
            None, bucket, config.num_buckets
        )
    MinhashDedupCluster(pairs, clusters, config=config, save_cluster_id=True, lines_to_buffer=1000).run(None, 0, 1)


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
        "J < 0.3": sum(similarity < 0.3 for similarity in similarities) / count,
    }
    for level in LEVELS:
        planted = [(i, corpus.origin[i]) for i, how in enumerate(corpus.how) if how == level and how is not None]
        if planted:
            found[f"found at {level:.0%}"] = sum(a in removed or b in removed for a, b in planted) / len(planted)
    return found


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--functions", type=int, default=4000)
    parser.add_argument("--similarity", default="0.6")
    parser.add_argument("--boilerplate", metavar="N", help="also run with this option")
    parser.add_argument("--only", metavar="NAME", help="families whose name contains this")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    similarity = ("--similarity", arguments.similarity)
    tools: dict[str, Any] = {"dedup": lambda *places: ours(*places, *similarity)}
    if arguments.boilerplate:
        lines = ("--boilerplate", arguments.boilerplate)
        tools[f"dedup {' '.join(lines)}"] = lambda *places: ours(*places, *similarity, *lines)
    tools |= {"datatrove": datatroves, "datatrove 2, 60, 7": lambda *places: datatroves(*places, 2, 60, 7)}
    results = []
    for name, corpus in families(arguments.pages, arguments.functions):
        if arguments.only and arguments.only not in name:
            continue
        for tool, run in tools.items():
            with tempfile.TemporaryDirectory(prefix="families_") as folder:
                path = corpus.write(Path(folder, "corpus.jsonl"))
                before = cpu_seconds()
                found = judged(corpus, run(path, Path(folder, "work")))
            results.append({"family": name, "tool": tool, **found, "CPU s": cpu_seconds() - before})
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    columns = ("removed", "J < 0.5", "J < 0.3", *(f"found at {level:.0%}" for level in LEVELS))
    print(f"| family | tool | {' | '.join(columns)} | CPU s |\n|{'---|' * (len(columns) + 3)}")
    for row in results:
        cells = [f"{row[column]:.1%}" if column in row else "" for column in columns]
        print(f"| {row['family']} | {row['tool']} | {' | '.join(cells)} | {row['CPU s']:.1f} |")


if __name__ == "__main__":
    main()
