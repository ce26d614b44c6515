"""Which test runs which line, measured one test file at a time and remembered until a file that it ran changes."""

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from .mutants import Mutant
from .processes import run_limited
from .tree import Tree


@dataclass
class Test:
    """One test that passes on the unchanged tree."""

    name: str
    seconds: float
    fixtures: list[str]
    keeps_module: bool  # uses fixtures that live as long as its file's tests follow each other

    @property
    def file(self) -> str:
        return self.name.split("::")[0]


@dataclass
class CoverageMap:
    """The tests, and for every source file and line the contexts (tests and shared fixtures) that ran it."""

    tests: dict[str, Test] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def add(self, record: dict) -> None:
        for name, test in record["tests"].items():
            if test["passed"]:
                self.tests[name] = Test(name, test["seconds"], test["fixtures"], test["keeps_module"])
        for path, contexts in record["lines"].items():
            lines = self.lines.setdefault(path, {})
            for context, numbers in contexts.items():
                for number in numbers:
                    lines.setdefault(number, set()).add(context)

    def select(self, mutant: Mutant) -> list[Test]:
        """Return the tests that can notice a mutant: those that ran its line, then others that are near."""
        lines = self.lines.get(mutant.path, {})
        ran = (lines.get(number, set()) for number in mutant.reach)
        contexts = set().union(*ran) if not mutant.runs_on_import else set()
        first = self._of(contexts)
        files = {test.file for test in first}
        near = [test for test in self.tests.values() if test.file in files or mirrors(test.file, mutant.path)]
        if not first:  # it runs when the file is imported, or where nothing measures
            near += self._of(set().union(*lines.values()))
        chosen = {test.name for test in first}
        rest = {test.name: test for test in near if test.name not in chosen}
        return [*in_order(first), *in_order(list(rest.values()))]

    def _of(self, contexts: set[str]) -> list[Test]:
        return [t for t in self.tests.values() if t.name in contexts or contexts.intersection(t.fixtures)]


def mirrors(test_file: str, path: str) -> bool:
    """Say whether a test file is the one that the layout of tests/ gives to a source file, or its whole folder."""
    parts = Path(path).with_suffix("").parts
    folder = Path("tests", *(parts if parts[0] != "megatron_blackmamba" else parts[1:])).parent
    return Path(test_file).parent == folder and (folder != Path("tests") or Path(test_file).stem == f"test_{parts[-1]}")


def in_order(tests: list[Test]) -> list[Test]:
    """Sort by time; tests that share a file's fixtures stay together, so that these are made once."""
    slowest: dict[str, float] = {}
    for test in tests:
        group = test.file if test.keeps_module else test.name
        slowest[group] = max(slowest.get(group, 0.0), test.seconds)
    return sorted(tests, key=lambda t: (slowest[t.file if t.keeps_module else t.name], t.file, t.seconds))


def build(tree: Tree, test_files: list[str], packages: list[str], limit: float, say) -> CoverageMap:
    """Return the map of `test_files`, measuring those whose record is absent or stale."""
    merged = CoverageMap()
    folder = tree.work / "map"
    folder.mkdir(exist_ok=True)
    for place, name in enumerate(test_files, 1):
        stored = folder / (name.replace("/", "__") + ".json")
        record = json.loads(stored.read_text()) if stored.exists() else None
        if record is None or not is_current(record, tree.root):
            began = time.monotonic()
            record = measure(tree, name, packages, limit)
            stored.with_suffix(".new").write_text(json.dumps(record))
            stored.with_suffix(".new").replace(stored)
            passed = sum(test["passed"] for test in record["tests"].values())
            counts = f"{passed} of {len(record['tests'])} tests passed"
            say(f"map {place}/{len(test_files)} {name}: {counts} in {time.monotonic() - began:.0f} s")
        merged.add(record)
    return merged


def measure(tree: Tree, name: str, packages: list[str], limit: float) -> dict:
    """Run one test file and return its tests and the lines that they and their processes ran."""
    shutil.rmtree(tree.measurements, ignore_errors=True)
    tree.context.write_text("")
    report = tree.work / "record.json"
    report.unlink(missing_ok=True)
    try:
        run_limited(tree, [name], {"MUTATION_RECORD": str(report)}, limit)
    finally:
        tree.context.unlink()
    lines, files = read_measurements(tree, packages)
    tests = json.loads(report.read_text()) if report.exists() else {}
    files = {*files, name}
    return {"tests": tests, "lines": lines, "files": {file: digest(tree.root / file) for file in sorted(files)}}


def read_measurements(tree: Tree, packages: list[str]) -> tuple[dict[str, dict[str, list[int]]], set[str]]:
    from coverage import CoverageData

    lines: dict[str, dict[str, set[int]]] = {}
    files = set()
    for part in tree.measurements.glob("lines.*") if tree.measurements.exists() else []:
        data = CoverageData(str(part))
        try:
            data.read()
        except Exception:  # its process was killed while it wrote
            continue
        for measured in data.measured_files():
            path = os.path.relpath(measured, tree.root)
            files.add(path)
            if not path.startswith(tuple(packages)):
                continue
            for number, contexts in data.contexts_by_lineno(measured).items():
                for context in filter(None, contexts):
                    context = context.rsplit("|", 1)[-1]  # the process that runs tests has no context of its own
                    lines.setdefault(path, {}).setdefault(context, set()).add(number)
    return {p: {c: sorted(n) for c, n in contexts.items()} for p, contexts in lines.items()}, files


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def is_current(record: dict, root: Path) -> bool:
    return all(digest(root / file) == known for file, known in record["files"].items())
