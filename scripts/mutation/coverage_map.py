"""Which test runs which line, measured one test file at a time and remembered until a file that it ran changes."""

import hashlib
import json
import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from .mutants import Mutant
from .processes import ForkServer
from .tree import Tree


@dataclass
class Test:
    """One test that passes on the unchanged tree."""

    name: str
    seconds: float  # without its shared fixtures
    fixtures: dict[str, float]  # the shared fixtures that it uses, and the seconds to make each
    digest: str  # of its file

    @property
    def file(self) -> str:
        return self.name.split("::")[0]

    @property
    def alone(self) -> float:
        return self.seconds + sum(self.fixtures.values())


@dataclass
class CoverageMap:
    """The tests, and for every source file and line the contexts (tests and shared fixtures) that ran it."""

    tests: dict[str, Test] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def add(self, record: dict) -> None:
        for name, test in record["tests"].items():
            if test["passed"]:
                fixtures = {fixture: record["fixtures"].get(fixture, 0.0) for fixture in test["fixtures"]}
                self.tests[name] = Test(name, test["seconds"], fixtures, record["files"][name.split("::")[0]])
        for path, contexts in record["lines"].items():
            lines = self.lines.setdefault(path, {})
            for context, numbers in contexts.items():
                for number in numbers:
                    lines.setdefault(number, set()).add(context)

    def select(self, mutant: Mutant) -> list[Test]:
        """Return the tests that can notice a mutant, quickest first: those that ran its line.

        What runs on import, or where nothing measures, is left to the tests of the whole file and of its folder.
        """
        lines = self.lines.get(mutant.path, {})
        ran = (lines.get(number, set()) for number in mutant.reach)
        chosen = self._of(set().union(*ran)) if not mutant.runs_on_import else []
        if not chosen:
            near = [test for test in self.tests.values() if mirrors(test.file, mutant.path)]
            rest = {test.name: test for test in self._of(set().union(*lines.values()))}
            chosen = near + [test for test in rest.values() if test not in near]
        return in_order(chosen)

    def _of(self, contexts: set[str]) -> list[Test]:
        return [t for t in self.tests.values() if t.name in contexts or contexts.intersection(t.fixtures)]


def mirrors(test_file: str, path: str) -> bool:
    """Say whether a test file is the one that the layout of tests/ gives to a source file, or its whole folder."""
    parts = Path(path).with_suffix("").parts
    folder = Path("tests", *(parts if parts[0] != "megatron_blackmamba" else parts[1:])).parent
    return Path(test_file).parent == folder and (folder != Path("tests") or Path(test_file).stem == f"test_{parts[-1]}")


def in_order(tests: list[Test]) -> list[Test]:
    """Sort by time, in steps of twice as long; in a step, tests of one file follow each other and share fixtures."""
    return sorted(tests, key=lambda t: (math.ceil(math.log2(max(t.alone, 0.5))), t.file, t.alone))


def within(tests: list[Test], limit: float) -> tuple[list[Test], float]:
    """Return the first tests that took no more than `limit` seconds together, but at least one, and their seconds."""
    chosen: list[Test] = []
    made: set[str] = set()
    spent = 0.0
    for test in tests:
        cost = test.seconds + sum(seconds for name, seconds in test.fixtures.items() if name not in made)
        if chosen and spent + cost > limit:
            break
        chosen.append(test)
        made.update(test.fixtures)
        spent += cost
    return chosen, spent


def build(server: ForkServer, test_files: list[str], packages: list[str], limit: float, say) -> CoverageMap:
    """Return the map of `test_files`, measuring those whose record is absent, stale or cut off by a smaller limit."""
    merged = CoverageMap()
    tree = server.tree
    folder = tree.work / "map"
    folder.mkdir(exist_ok=True)
    records = {}
    for name in test_files:
        stored = stored_at(folder, name)
        record = json.loads(stored.read_text()) if stored.exists() else None
        records[name] = record if record and is_current(record, tree.root) else None
    wanted = [name for name, record in records.items() if record is None or limit > record["limit"]]
    began = time.monotonic()
    for place, name in enumerate(wanted, 1):
        record = records[name] = measure(server, name, packages, limit, records[name])
        new = stored_at(folder, name).with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(stored_at(folder, name))
        passed = sum(test["passed"] for test in record["tests"].values())
        counts = f"{passed} of {len(record['tests'])} tests passed" + ("" if record["complete"] else ", cut off")
        eta = left((time.monotonic() - began) / place * (len(wanted) - place))
        say(f"map {place}/{len(wanted)} {name}: {counts}{eta}")
    for record in records.values():
        merged.add(record)
    return merged


def stored_at(folder: Path, name: str) -> Path:
    return folder / (name.replace("/", "__") + ".json")


def left(seconds: float) -> str:
    return f" ({seconds / 60:.0f} min left)" if seconds > 60 else ""


def measure(server: ForkServer, name: str, packages: list[str], limit: float, earlier: dict | None = None) -> dict:
    """Run one test file and return its tests and the lines that they and their processes ran.

    An `earlier` record, of a smaller limit, is continued.
    """
    tree = server.tree
    shutil.rmtree(tree.measurements, ignore_errors=True)
    tree.context.write_text("")
    report = tree.work / "record.json"
    report.unlink(missing_ok=True)
    try:
        variables = {"MUTATION_RECORD": str(report), "MUTATION_LIMIT": str(limit)}
        if earlier:
            (tree.work / "measured.json").write_text(json.dumps(list(earlier["tests"])))
            variables["MUTATION_MEASURED"] = str(tree.work / "measured.json")
        server.run([name], variables, 2 * limit + 60)
    finally:
        tree.context.unlink()
    lines, files = read_measurements(tree, packages)
    record = json.loads(report.read_text()) if report.exists() else {"tests": {}, "fixtures": {}, "complete": False}
    digests = {file: digest(tree.root / file) for file in sorted({*files, name})}
    record |= {"lines": lines, "files": digests, "limit": float("inf") if record["complete"] else limit}
    return record if earlier is None else joined(earlier, record)


def joined(earlier: dict, later: dict) -> dict:
    """Join the records of two measurements of one test file, which ran different tests."""
    merged = later | {part: earlier[part] | later[part] for part in ("tests", "fixtures", "files")}
    merged["lines"] = {
        path: earlier["lines"].get(path, {}) | later["lines"].get(path, {})
        for path in earlier["lines"].keys() | later["lines"].keys()
    }
    return merged


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
