"""Run all of `make test` on other Pythons, which install other versions of megatron-core, and write down what passed.

    python scripts/pythons.py python3.10 python3.12      one or several interpreters
    make pythons ARGS="python3.10 python3.12"            the same

Each interpreter gets an environment by `make install`, in .venv-VERSION. A result names the commit and the date. They
are in requirements/pythons.json, and docs/versions.md shows them. Changed files that are not committed are refused.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import borders

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "requirements" / "pythons.json"
BESIDE = ("megatron-core", "torch", "transformers")


@dataclass(frozen=True)
class Result:
    """The outcome of `make test` on one Python."""

    python: str
    passed: bool
    said: str
    """The last line that pytest printed."""
    seconds: int
    commit: str
    date: str
    machine: str
    beside: dict[str, str]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="interpreters, such as python3.12")
    given = parser.parse_args(words)
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        parser.error(f"a result names a commit, and these files differ from it:\n{changed}\nCommit them first")
    for python in given.pythons:
        result = run(python)
        write_results([*(old for old in read_results() if old.python != result.python), result])
        borders.PAGE.write_text(borders.page(borders.read_results()))  # now: the next run compares the two
        print(f"{result.python}: {'passed' if result.passed else 'FAILED'}: {result.said}", flush=True)
    return 0 if all(result.passed for result in read_results()) else 1


def run(python: str) -> Result:
    version = subprocess.check_output([python, "-c", "import platform; print(platform.python_version())"], text=True)
    venv, commit, begun = f".venv-{version.strip()}", git("rev-parse", "--short=10", "HEAD"), time.monotonic()
    words = ["make", "test", f"PYTHON={python}", f"VENV={venv}"]
    done = subprocess.run(words, cwd=ROOT, env=without_make(os.environ), **borders.CAPTURED)
    if done.returncode:
        (ROOT / venv / "failed.log").write_text(done.stdout)
    return Result(
        version.strip(),
        done.returncode == 0,
        borders.last_words(done.stdout),
        round(time.monotonic() - begun),
        commit,
        datetime.date.today().isoformat(),
        borders.processor(),
        borders.versions_in(ROOT / venv / "bin" / "python", BESIDE),
    )


def without_make(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a user's shell has: `make pythons` hands its own ARGS and flags down, which pytest would be given."""
    ours = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
    return {name: value for name, value in environment.items() if name not in ours}


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def read_results() -> list[Result]:
    return [Result(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.is_file() else []


def write_results(results: Sequence[Result]) -> None:
    ordered = sorted(results, key=lambda result: borders.numbers(result.python))
    RESULTS.write_text(json.dumps([dataclasses.asdict(result) for result in ordered], indent=1) + "\n")


def table(results: Sequence[Result]) -> str:
    """Return a table of Markdown, a row a Python."""
    lines = [f"| Python | {' | '.join(BESIDE)} | `make test` | commit, date |", "|---" * (len(BESIDE) + 3) + "|"]
    for result in results:
        versions = " | ".join(result.beside[name] for name in BESIDE)
        said = result.said if result.passed else f"**failed**: {result.said}"
        lines.append(f"| {result.python} | {versions} | {said} | {result.commit}, {result.date} |")
    return "\n".join(lines) if results else "Nothing has been measured yet."


if __name__ == "__main__":
    raise SystemExit(main())
