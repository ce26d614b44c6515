"""CPU time, memory and disk of each stage of `data dedup`, at several numbers of documents, and an extrapolation.

    python -m benchmarks.dedup_scale [--documents 40000 80000 160000] [--words 60] [--json]

A third of the random documents are copies of others: exact, or with 5% of their words changed. The stages run one after
another in a process each, with one worker. A line through the smaller sizes predicts the largest; the residual is by
how much the measured CPU time differs from that. The last column scales the largest size.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cleaning import Words, change

BILLION = 1e9


def write_corpus(path: Path, documents: int, words: int, seed: int) -> None:
    choose = random.Random(seed)
    source = Words(choose)
    earlier: list[str] = []
    with path.open("w") as file:
        for number in range(documents):
            if number % 3 == 2:
                text = choose.choice(earlier)
                text = text if number % 2 else change(text, 0.05, source.words, choose)
            else:
                text = " ".join(source.take(words))
                earlier.append(text)
            file.write(json.dumps({"text": text}) + "\n")


def stages_of(corpus: Path, out: Path) -> list[Any]:
    from megatron_blackmamba.data_tools import cleaning
    from megatron_blackmamba.data_tools.batches import ReadOptions
    from megatron_blackmamba.data_tools.dedup_estimate import Estimate
    from megatron_blackmamba.data_tools.deduplication import stages
    from megatron_blackmamba.data_tools.options import DedupOptions
    from megatron_blackmamba.data_tools.rejects import Tolerance
    from megatron_blackmamba.data_tools.sources import find_sources, plan_shards

    cleaning.require_datatrove()
    options = DedupOptions(workers=1)
    parts = plan_shards(find_sources([str(corpus)]).sources, 4 << 20)
    task = cleaning.Cleaning("dedup", parts, out, ReadOptions(), Tolerance(), options, {})
    task.work.mkdir(parents=True)
    return stages(task, options, Estimate.of(task, options))


def measured(corpus: Path, out: Path) -> Iterator[dict[str, Any]]:
    """Yield each stage with its CPU seconds, the memory of its process, and the disk in use after it."""
    for stage in stages_of(corpus, out):
        stage.depends = None
        child = os.fork()
        if child == 0:
            try:
                stage.run()
            except BaseException as error:
                print(error, flush=True)
                os._exit(1)
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        if status:
            raise SystemExit("a stage failed")
        disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        name = Path(stage.logging_dir.path).name
        yield {
            "stage": name,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "peak_gb": used.ru_maxrss / 1e6,
            "disk_gb": disk / 1e9,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[40_000, 80_000, 160_000])
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for count in arguments.documents:
        with tempfile.TemporaryDirectory(prefix="dedup_scale_") as name:
            (Path(name) / "in").mkdir()
            for part in range(8):  # files, so that there are parts
                write_corpus(Path(name) / f"in/{part}.jsonl", count // 8, arguments.words, part)
            for row in measured(Path(name) / "in", Path(name) / "out"):
                results.setdefault(row["stage"], []).append(row)
    if arguments.json:
        print(json.dumps(dict(zip(("documents", "stages"), (arguments.documents, results), strict=True)), indent=2))
        return
    counts = np.array(arguments.documents, float)
    head = [f"CPU s at {count:,}" for count in arguments.documents]
    print(f"| stage | {' | '.join(head)} | residual | peak GB | disk GB | CPU-h at 1e9 |")
    print(f"|{'---|' * (len(head) + 5)}")
    for stage, rows in results.items():
        seconds = np.array([row["cpu_seconds"] for row in rows])
        slope, start = np.polyfit(counts[:-1], seconds[:-1], 1)
        predicted = start + slope * counts[-1]
        cells = [f"{value:.1f}" for value in seconds]
        print(
            f"| {stage} | {' | '.join(cells)} | {seconds[-1] / predicted - 1:+.0%} | {rows[-1]['peak_gb']:.2f} "
            f"| {rows[-1]['disk_gb']:.2f} | {seconds[-1] / counts[-1] * BILLION / 3600:.1f} |"
        )


if __name__ == "__main__":
    main()
