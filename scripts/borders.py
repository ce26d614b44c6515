"""Run the tests that touch other packages, at the oldest, the locked and the newest version of each.

    python scripts/borders.py                            every row that has no result yet
    python scripts/borders.py transformers datatrove     the rows of these packages
    python scripts/borders.py transformers==5.24.0       one version
    python scripts/borders.py --again openai             rows that have a result too
    python scripts/borders.py --page                     docs/versions.md, from the results alone

Each version gets an environment in build/borders that shares all other packages with the environment of this Python. A
killed call continues with the same command. The results are in megatron_blackmamba/launch/tried.json, which `blackmamba
doctor` reads, and docs/versions.md is made from them. `make borders` runs this; it needs a network.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
ENVIRONMENTS = ROOT / "build" / "borders"
RESULTS = ROOT / "megatron_blackmamba" / "launch" / "tried.json"
PAGE = ROOT / "docs" / "versions.md"
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider"]
NEWEST = "newest"


@dataclass(frozen=True)
class Border:
    """A package, the versions to try beside the locked one, and the checks: a name and the words after `python`."""

    package: str
    versions: tuple[str, ...]
    checks: dict[str, list[str]]
    beside: tuple[str, ...] = ()
    """Packages that are installed with it, in versions that fit."""


TRAINING = "scripts/hf_training.py"
BORDERS = (
    Border(
        "transformers",
        ("4.50.3", "4.57.6", "5.20.2", "5.23.0", NEWEST),
        {
            "forward, generate": [*PYTEST, "tests/hf", "--ignore=tests/hf/test_lm_eval.py"],
            "lm-eval": [*PYTEST, "tests/hf/test_lm_eval.py"],
            "Trainer": [TRAINING, "trainer"],
            "SFTTrainer": [TRAINING, "sft"],
            "PEFT": [TRAINING, "peft"],
            "generic tests": ["scripts/hf_generic_tests.py"],
        },
        ("accelerate", "datasets", "trl", "peft", "parameterized"),
    ),
    Border(
        "torch",
        ("2.9.1", NEWEST),
        {
            "ops, model, decoding": [*PYTEST, "tests/ops", "tests/model", "tests/inference", "--ignore-glob=*triton*"],
            "checkpoints, exports": [*PYTEST, "tests/checkpoint", "tests/interchange"],
        },
    ),
    Border("lm-eval", ("0.4.13", NEWEST), {"evaluation": [*PYTEST, "tests/evaluation", "tests/hf/test_lm_eval.py"]}),
    Border(
        "datatrove",
        ("0.10.0", NEWEST),
        {"cleaning": [*PYTEST, "tests/data_tools/test_dedup.py", "tests/data_tools/test_cleaning.py"]},
    ),
    Border("tokenizers", (NEWEST,), {"tokenizers": [*PYTEST, "tests/tokenizer"]}),
    Border("openai", ("1.56.0", NEWEST), {"endpoint": [*PYTEST, "tests/serving", "-k", "openai or client"]}),
)


@dataclass(frozen=True)
class Result:
    """The outcome of a check; `passed` is False too if the environment could not be made."""

    package: str
    version: str
    check: str
    passed: bool
    said: str
    """The last line that pytest or the script printed."""
    seconds: int
    date: str
    python: str
    machine: str
    beside: dict[str, str]
    """Versions of the packages beside it."""
    commit: str = ""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="PACKAGE[==VERSION]", help="packages to try; default: all")
    parser.add_argument("--again", action="store_true", help="repeat rows that have a result")
    parser.add_argument("--page", action="store_true", help="only write docs/versions.md")
    given = parser.parse_args(words)
    unknown = {row.split("==")[0] for row in given.rows} - {border.package for border in BORDERS}
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}. Rows: {', '.join(b.package for b in BORDERS)}")
    results = read_results()
    if not given.page:
        for border, version in rows(given.rows):
            for name, check in border.checks.items():
                known = [r for r in results if (r.package, r.version, r.check) == (border.package, version, name)]
                if known and not given.again:
                    continue
                print(f"{border.package} {version}: {name}", flush=True)
                results = [r for r in results if r not in known] + [run(border, version, name, check)]
                write_results(results)
                print(f"    {'passed' if results[-1].passed else 'FAILED'}: {results[-1].said}", flush=True)
    PAGE.write_text(page(results))
    print(f"\n{table(results)}")
    return 0 if all(result.passed for result in results) else 1


def rows(asked: Sequence[str]) -> Iterator[tuple[Border, str]]:
    """Yield the borders and versions to try; an asked version need not be in the table."""
    for border in BORDERS:
        mine = [row for row in asked if row.split("==")[0] == border.package]
        versions = [row.split("==")[1] for row in mine if "==" in row]
        if versions or not asked or mine:
            locked = metadata.version(border.package).split("+")[0]
            found = [newest(border.package) if v == NEWEST else v for v in versions or (*border.versions, locked)]
            yield from ((border, version) for version in dict.fromkeys(found))


def run(border: Border, version: str, name: str, check: list[str]) -> Result:
    python, problem = environment(border, version)
    begun = time.monotonic()
    if problem:
        passed, said = False, problem
    else:
        # The shared packages come without what their .pth files add, so processes elsewhere would not find the project.
        done = subprocess.run(
            [python, *check], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, **CAPTURED
        )
        passed, said = done.returncode == 0, last_words(done.stdout)
        if not passed:
            log_of(python, name).write_text(done.stdout)
    return Result(
        *(border.package, version, name, passed, said, round(time.monotonic() - begun)),
        date=datetime.date.today().isoformat(),
        python=platform.python_version(),
        machine=processor(),
        beside={} if problem else versions_in(python, [*border.beside, "torch", "megatron-core"]),
        commit=commit(),
    )


def commit() -> str:
    """Return the commit, marked if files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, **CAPTURED).stdout.strip()


def log_of(python: Path, name: str) -> Path:
    """Return where the output of a failed check is kept, in the environment."""
    return python.parents[1] / f"{re.sub('[^A-Za-z0-9]+', '_', name)}.log"


CAPTURED: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}


def environment(border: Border, version: str) -> tuple[Path, str]:
    """Return the interpreter of an environment with one version of a package, and what went wrong while making it."""
    folder = ENVIRONMENTS / f"{border.package}-{version}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        own = Path(subprocess.check_output([python, "-c", SITE], text=True).strip())
        shared = [sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("-packages"))]
        (own / "shared.pth").write_text("\n".join(dict.fromkeys(shared)))  # behind the environment's own packages
        wanted = [f"{border.package}=={version}", *border.beside]
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile", *wanted]
        done = subprocess.run(pip, **CAPTURED)
        if done.returncode:
            return python, f"pip: {last_words(done.stdout)}"
        ready.touch()
    return python, ""


SITE = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


def newest(package: str) -> str:
    """Return the newest version on the package index."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", package]
    found = re.search(r"\(([^)]+)\)", subprocess.run(pip, **CAPTURED, check=True).stdout)
    assert found is not None
    return found[1]


def versions_in(python: Path, packages: Sequence[str]) -> dict[str, str]:
    code = "import json, sys, importlib.metadata as m; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    return json.loads(subprocess.check_output([python, "-c", code, *packages], text=True))


def last_words(output: str) -> str:
    """Return the last line that says something, without pytest's decoration."""
    lines = [line.strip("= \t") for line in output.splitlines() if line.strip("= .\t")]
    counted = [line for line in lines if re.search(r"\d+ (passed|failed|skipped)", line)]
    return (counted or lines or ["nothing"])[-1][:200]


def processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{os.cpu_count()} cores, {found[1] if found else platform.machine()}"


def read_results() -> list[Result]:
    return [Result(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.is_file() else []


def write_results(results: Sequence[Result]) -> None:
    order = [border.package for border in BORDERS]
    ordered = sorted(results, key=lambda r: (order.index(r.package), numbers(r.version)))
    text = json.dumps([dataclasses.asdict(result) for result in ordered], indent=1)
    RESULTS.with_suffix(".new").write_text(text + "\n")
    os.replace(RESULTS.with_suffix(".new"), RESULTS)


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def table(results: Sequence[Result]) -> str:
    """Return one table of Markdown for each package: a row a version, a column a check."""
    parts = []
    for border in BORDERS:
        mine = [result for result in results if result.package == border.package]
        if not mine:
            continue
        lines = [
            f"| {border.package} | {' | '.join(border.checks)} | date, Python, commit |",
            "|---" * (len(border.checks) + 2) + "|",
        ]
        for version in sorted({result.version for result in mine}, key=numbers):
            found = {result.check: result for result in mine if result.version == version}
            cells = [cell(found.get(name)) for name in border.checks]
            last = max(found.values(), key=lambda result: result.date)
            lines.append(
                f"| {version} | {' | '.join(cells)} | {last.date}, {last.python}{last.commit and f', {last.commit}'} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def cell(result: Result | None) -> str:
    if result is None:
        return "not tried"
    counted = re.match(r"[\d a-z,]*\d+ (passed|failed)[\d a-z,]*", result.said)
    what = re.sub(r",? *\d+ (warnings?|deselected)|,? in .*", "", counted[0]).strip(" ,") if counted else "passed"
    if not result.passed:
        return f"**failed**: {result.said}"
    return f"passed ({what}; these fail with Mamba too)" if "failed" in what else what


def page(results: Sequence[Result]) -> str:
    from scripts import pythons

    machines = "; ".join(sorted({result.machine for result in results}))
    return f"""# Versions of other packages

`make install` takes the exact versions of `requirements/lock.txt`, with which all tests ran. `make install NEWEST=1`
takes the newest versions that pyproject.toml allows, and `make lock` makes them the locked ones. In pyproject.toml:

- A lower bound is the oldest version with which the tests passed. One that no row below shows is not measured yet.
- An upper bound stands only where a newer version is known to break something, or where the package promises no
  compatibility between such versions (megatron-core, whose private parts this project uses). The reason is beside it.

`blackmamba doctor` names installed packages that are older or newer than everything tried here.

## Pythons

Python decides which megatron-core is installed: 0.16.1 on 3.10 and 3.11, 0.19 on 3.12 and 3.13. `make pythons
ARGS="python3.10 python3.12"` runs all of `make test` on each and writes this table.

{pythons.table(pythons.read_results())}

## What was tried

`make borders` runs the tests that touch other packages, each version in an environment of its own. Some tests are
skipped where a version lacks what they need. This page is made from its results, measured on: {machines}.

{table(results)}

A row of transformers also has packages that go with it. The newest row has {beside(results)}.

"generic tests" are [transformers' own tests](measured.md#transformers-own-tests), run on our modeling files and on
its Mamba. A test that fails with ours alone fails the check.
"""


def beside(results: Sequence[Result]) -> str:
    newest_row = max(
        (r for r in results if r.package == "transformers"), key=lambda r: numbers(r.version), default=None
    )
    return (
        ", ".join(f"{name} {version}" for name, version in newest_row.beside.items()) if newest_row else "nothing yet"
    )


if __name__ == "__main__":
    raise SystemExit(main())
