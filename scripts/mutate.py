#!/usr/bin/env python3
"""Plant small faults in the package, one at a time, and say which of them the tests do not notice.

    python scripts/mutate.py --sample 50 --seed 1 megatron_blackmamba/plan

The repository is copied to build/mutation and only the copy is changed. The first run measures which test runs which
line, in the processes that tests start too, and takes as long as the suite. Later runs measure again only the test
files that ran a changed file; `--map-limit 15` begins with the first 15 seconds of each, and a larger one continues.

A mutant gets the quickest tests that ran its line, up to `--limit` seconds, until one fails. Results are JSON lines.
A second run tries what is not noticed yet, with the tests that are new, changed or beyond the earlier limit.
"""

import argparse
import ast
import difflib
import json
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

from mutation.coverage_map import CoverageMap, Test, build, left, within
from mutation.mutants import Mutant, find_mutants, sample
from mutation.processes import ForkServer, adopt_orphans, run_tests
from mutation.tree import Tree

ROOT = Path(__file__).resolve().parents[1]
NOTICED, SURVIVED, UNFINISHED, UNCOVERED = "noticed", "survived", "unfinished", "uncovered"
# Imported once for all runs. Not megatron-core and what imports it: the package patches it before.
PRELOAD = ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.utils.tensorboard")
PRELOAD += ("transformers.generation.utils", "pydantic", "typer.testing", "hypothesis", "pyarrow.parquet")
SLACK = 5  # a test has hung after this many times the seconds that it took when the map was made, and some


def main() -> int:
    options = parse()
    root = options.root.resolve()
    packages = options.paths or [name for name in ("megatron_blackmamba", "data_tools") if (root / name).exists()]
    chosen = sample(list(find_mutants(root, packages)), options.sample, options.seed)
    if options.list:
        print(*(f"{m.path}:{m.line} {m.kind}: {m.line_before} => {m.line_after}" for m in chosen), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended on the way out
    tree = Tree(root, options.work or root / "build" / "mutation")
    with tree.locked():
        adopt_orphans()
        tree.refresh()
        results = options.results or tree.work / f"results-{options.seed}.jsonl"
        tops = sorted({path.split("/")[0] for path in packages})
        with closing(ForkServer(tree, options.preload)) as server:
            covered = build(server, test_files(root, options.tests), tops, options.map_limit, say)
            run(server, chosen, covered, results, options.limit, options.survivors)
    return summarize(root, chosen, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="Files or folders to mutate (default: the package and data_tools).")
    parser.add_argument("--sample", type=int, default=50, help="Number of mutants (default 50).")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the sample (default 0).")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="Test files or folders to run (default tests).")
    parser.add_argument("--limit", type=float, default=60, help="Seconds of tests for one mutant (default 60).")
    parser.add_argument(
        "--map-limit", type=float, default=1800, help="Seconds to measure one test file (default 1800)."
    )
    parser.add_argument("--preload", nargs="*", default=PRELOAD, help="Modules to import before the tests.")
    parser.add_argument("--results", type=Path, help="JSON lines file (default build/mutation/results-SEED.jsonl).")
    parser.add_argument("--work", type=Path, help="Folder of the private copy (default build/mutation).")
    parser.add_argument("--root", type=Path, default=ROOT, help="Repository to test (default this one).")
    parser.add_argument("--survivors", action="store_true", help="Try only what an earlier run did not notice.")
    parser.add_argument("--list", action="store_true", help="List the sampled mutants and stop.")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def test_files(root: Path, names: list[str]) -> list[str]:
    files = []
    for name in names:
        top = root / name
        files += [top] if top.is_file() else sorted(top.rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files]


def run(
    server: ForkServer, chosen: list[Mutant], covered: CoverageMap, results: Path, limit: float, survivors: bool
) -> None:
    """Try the mutants that are not noticed yet, with the tests that they have not passed, and append each outcome."""
    done, known = read_results(results), equivalents(server.tree.root)
    wanted = []
    for mutant in chosen:
        source = (server.tree.root / mutant.path).read_bytes()
        before = done.get(mutant.id(source), {"status": None, "passed": {}})
        passed = before["passed"]
        tests = [test for test in covered.select(mutant) if passed.get(test.name) != test.digest]
        left_to_do = not survivors if before["status"] is None else before["status"] != NOTICED and tests
        if left_to_do and mutant.key() not in known and changes_the_program(mutant, source):
            wanted.append((before["status"] is not None, mutant, source, tests, passed))
    wanted.sort(key=lambda each: each[0])  # those never tried come first
    began = time.monotonic()
    with open(results, "a") as file:
        for place, (_, mutant, source, tests, passed) in enumerate(wanted, 1):
            outcome = try_mutant(server, mutant, source, tests, passed, limit)
            record = {"id": mutant.id(source), "path": mutant.path, "line": mutant.line, "kind": mutant.kind}
            file.write(json.dumps(record | {"key": mutant.key()} | outcome) + "\n")
            file.flush()
            eta = left((time.monotonic() - began) / place * (len(wanted) - place))
            took = f"{outcome['status']} in {outcome['seconds']:.0f} s"
            say(f"{place}/{len(wanted)} {took}: {mutant.path}:{mutant.line} {outcome.get('by', '')}{eta}")


def try_mutant(
    server: ForkServer, mutant: Mutant, source: bytes, tests: list[Test], passed: dict[str, str], limit: float
) -> dict:
    """Run the tests that took `limit` seconds without the mutant, and return what they said of it."""
    if not tests:
        return {"status": UNCOVERED, "seconds": 0.0, "tests": 0, "passed": {}}
    chosen, expected = within(tests, limit)
    file = server.tree.root / mutant.path
    try:
        file.write_bytes(mutant.apply(source))
        limits = {test.name: SLACK * test.alone + 20 for test in chosen}
        code, output, seconds = run_tests(server, limits, SLACK * expected + 60)
    finally:
        file.write_bytes(source)
    outcome = {"seconds": round(seconds, 1)}
    if code in (0, 5):
        passed = passed | {test.name: test.digest for test in chosen}
        status = UNFINISHED if len(chosen) < len(tests) else SURVIVED
        return outcome | {"status": status, "tests": len(passed), "left": len(tests) - len(chosen), "passed": passed}
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    ended = f"hung in one of {len(chosen)} tests" if code is None else f"pytest ended with {code}: {output[-300:]}"
    by = failed[0][:200] if failed else ended
    return outcome | {"status": NOTICED, "tests": len(passed) + len(chosen), "by": by, "passed": passed}


def changes_the_program(mutant: Mutant, source: bytes) -> bool:
    """Refuse edits that are no Python, or the same Python."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def read_results(results: Path) -> dict[str, dict]:
    lines = results.read_text().splitlines() if results.exists() else []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:  # cut off by a kill
            continue
    return {record["id"]: record for record in records}


def equivalents(root: Path) -> dict[str, str]:
    """Return the keys of mutants judged by hand to change nothing that can be seen, with the reason."""
    file = root / "scripts" / "mutation" / "equivalents.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    pairs = [line.rsplit(" # ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return {key.strip(): reason for key, reason in pairs}


def summarize(root: Path, chosen: list[Mutant], results: Path) -> int:
    """Print survivors as diffs, then the counts; return 1 if something survived."""
    done, known = read_results(results), equivalents(root)
    counts = dict.fromkeys([NOTICED, "equivalent", SURVIVED, UNFINISHED, UNCOVERED], 0)
    for mutant in chosen:
        source = (root / mutant.path).read_bytes()
        record = done.get(mutant.id(source), {"status": "equivalent"} if mutant.key() in known else None)
        if record is None:
            continue
        status = record["status"]
        if status != NOTICED and mutant.key() in known:
            status = "equivalent"
        counts[status] += 1
        if status not in (NOTICED, "equivalent"):
            print(f"\n{status}: {mutant.kind}, {record['tests']} tests\n{mutant.key()}\n{diff(mutant, source)}")
    judged = sum(counts.values()) - counts["equivalent"]
    print(f"\n{sum(counts.values())} mutants: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    if judged:
        print(f"noticed without the equivalent ones: {counts[NOTICED] / judged:.1%}; results: {results}")
    return int(counts[NOTICED] < judged)


def diff(mutant: Mutant, source: bytes) -> str:
    before, after = source.decode().splitlines(), mutant.apply(source).decode().splitlines()
    return "\n".join(list(difflib.unified_diff(before, after, mutant.path, "mutant", lineterm="", n=1))[2:])


if __name__ == "__main__":
    sys.exit(main())
