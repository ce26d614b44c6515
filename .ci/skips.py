"""Count the skipped tests of a pytest run by reason and compare them with those expected.

`python .ci/skips.py REPORT.xml [TABLE]` reads a `--junitxml` report and `skips.txt`. It fails when a test is skipped
for another reason, or when more are skipped than expected: explain the skip in the table, or make the test run.
"""

import re
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

TABLE = Path(__file__).with_name("skips.txt")


def skipped(report: Path) -> Counter[str]:
    """Return how many tests were skipped for each reason."""
    reasons: Counter[str] = Counter()
    for skip in xml.parse(report).iter("skipped"):
        reason = skip.get("message") or ""
        if reason == "collection skipped":  # a whole module; its text is "('file', line, 'Skipped: reason')"
            reason = (skip.text or "").partition("Skipped: ")[2].rstrip("')\"")
        reasons[reason] += 1
    return reasons


def expected(table: Path) -> list[tuple[str, float]]:
    """Return each expected reason, a regular expression, and how many skips it may have."""
    rows = [line for line in table.read_text().splitlines() if line.strip() and not line.startswith("#")]
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    return [(pattern, float("inf") if most == "any" else int(most)) for most, pattern, _ in cells]


def main(report: Path, table: Path = TABLE) -> int:
    """Print the skips by reason and return 1 if one is not explained."""
    reasons, problems = skipped(report), []
    for reason, count in reasons.most_common():
        print(f"{count:5}  {reason}")
    print(f"{reasons.total():5}  skipped in all")
    for pattern, most in expected(table):
        matching = [reason for reason in reasons if re.search(pattern, reason)]
        count = sum(reasons.pop(reason) for reason in matching)
        if count > most:
            problems.append(f"{count} tests skipped, {most} expected: {pattern}")
    problems += [f"unexplained skip of {count} tests: {reason}" for reason, count in reasons.items()]
    for problem in problems:
        print(f"{problem}. Make them run, or explain them in {table}.", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
