"""The documents that `data dedup` keeps from four orders of the files, with 1 and 4 workers and 1 and 9 parts.

    python -m benchmarks.dedup_orders [--documents 3000]

The corpus has exact, edited and truncated copies, and copies of copies. Each row prints the sha256 of the kept texts
in alphabetical order; the command fails if two differ.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.cleaning import change
from benchmarks.dedup_families import Words

ORDERS, WORKERS, PARTS = 4, (1, 4), (1, 9)
FILES = 9


def texts_of(documents: int) -> list[str]:
    """Return documents, half of them copies of others."""
    choose = random.Random(0)
    words = Words(choose)
    texts = [" ".join(words.take(choose.randint(40, 200))) for _ in range(documents // 2)]
    while len(texts) < documents:
        text = choose.choice(texts)  # a copy is copied too
        forms = (text, text.upper(), change(text, 0.05, words.words, choose), text[: len(text) * 4 // 5])
        texts.append(choose.choice(forms))
    return texts


def kept_texts(corpus: Path, out: Path, workers: int, parts: int) -> list[str]:
    size = "1GB" if parts == 1 else "1B"
    command = [sys.executable, "-m", "megatron_blackmamba", "data", "dedup", str(corpus), str(out)]
    subprocess.run(
        [*command, "--workers", str(workers), "--part-size", size, "--json"], check=True, capture_output=True
    )
    kept = []
    for path in out.glob("part_*"):
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            kept += [json.loads(line)["text"] for line in file]
    return sorted(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=3000)
    arguments: Any = parser.parse_args()
    texts, found = texts_of(arguments.documents), set()
    print("| order of the files | workers | parts | kept | removed | sha256 of the kept texts |")
    print("|---|---|---|---|---|---|", flush=True)
    for order in range(ORDERS):
        random.Random(order).shuffle(texts)
        with tempfile.TemporaryDirectory(prefix="dedup_orders_") as name:
            corpus = Path(name) / "in"
            corpus.mkdir()
            for file in range(FILES):
                lines = (json.dumps({"text": text}) + "\n" for text in texts[file::FILES])
                (corpus / f"{file}.jsonl").write_text("".join(lines))
            for workers in WORKERS:
                for parts in PARTS:
                    kept = kept_texts(corpus, Path(name) / f"out_{workers}_{parts}", workers, parts)
                    digest = hashlib.sha256("\0".join(kept).encode()).hexdigest()
                    found.add(digest)
                    row = [order + 1, workers, parts, f"{len(kept):,}", f"{len(texts) - len(kept):,}", digest[:16]]
                    print(f"| {' | '.join(map(str, row))} |", flush=True)
    if len(found) > 1:
        raise SystemExit("the kept texts differ")


if __name__ == "__main__":
    main()
