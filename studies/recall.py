"""Tell what the models of a study recall, by distance.

    blackmamba evaluate RUN --tasks length:passkey,length:recall --length 4096 --limit 8      # for each run
    python -m studies.recall --runs studies/mixers/runs --budget 4400000 --write docs/studies/mixers_recall.json
    python -m studies.recall                                    # prints the table of docs/mixers.md from that file

A fact stands in a text, and a question for it at the end. The bits gained say how much likelier the answer is than
after the same text with another fact: zero if the model does not use it. Means and 95% intervals are over seeds.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.evaluations import read_run
from megatron_blackmamba.report.confidence import mean_of

POINTS = Path(__file__).parents[1] / "docs" / "studies" / "mixers_recall.json"
TASKS = ("length:passkey", "length:recall")
DISTANCES = ((0, 128), (128, 256), (256, 4096))
"""Tokens between a fact and its question: above the first number, up to the second."""


def collected(runs: Path, budget: int) -> Iterator[dict]:
    """Yield what each scored run of a budget was found to gain, by task, length and depth."""
    for folder in sorted(runs.glob(f"*-{budget}")):
        named = re.fullmatch(rf"(\w+)-\w+-seed(\d+).*-{budget}", folder.name)
        results = scores[-1].by_task() if named and (scores := read_run(folder)) else {}
        if named and set(TASKS) <= set(results):
            rows = {task: [dict(row) for row in results[task].rows] for task in TASKS}
            yield {"variant": named[1], "seed": int(named[2]), "rows": rows}


def gained(rows: list[dict], above: int, up_to: int) -> float:
    """Return the mean gain, in bits, of the facts at these distances."""
    places = [(row["length"] * (1 - row["depth"]), row["gain_bits"]) for row in rows]
    gains = [gain for place, gain in places if (above < place or above == 0) and place <= up_to]
    return sum(gains) / len(gains)


def table(points: list[dict]) -> str:
    """Return a row for each variant."""
    far = [f"{'up to' if above == 0 else f'{above + 1:,} to'} {up_to:,}" for above, up_to in DISTANCES]
    heads = ["model", "seeds", *(f"{task.partition(':')[2]}, {name}" for task in TASKS for name in far)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for variant in dict.fromkeys(point["variant"] for point in points):
        own = [point for point in points if point["variant"] == variant]
        cells = [
            mean_of([gained(point["rows"][task], *distance) for point in own], "+")
            for task in TASKS
            for distance in DISTANCES
        ]
        lines.append(f"| {' | '.join([variant, str(len(own)), *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of scored runs; without it the file is read")
    parser.add_argument("--budget", type=int, default=4_400_000)
    parser.add_argument("--write", type=Path, default=POINTS)
    asked = parser.parse_args()
    if asked.runs:
        lines = ",\n".join(map(json.dumps, collected(asked.runs, asked.budget)))
        atomic.write_text(asked.write, f"[\n{lines}\n]\n")
    print(table(json.loads(asked.write.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
