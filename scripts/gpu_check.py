"""All checks and measurements on one GPU, in parts; a second call goes on where the first one stopped.

    python -m scripts.gpu_check RESULTS [--carried FOLDER] [--minutes 9] [--parts 1 2 3 4 5 6]

scripts/gpu_check.sh prepares a machine without network and calls this. Each part writes its table to RESULTS/part_N.md
as Markdown, and all of them go to RESULTS/summary.md. What passed is not run again; tests and benchmarks that were cut
or failed are. The time that is left is divided among the parts that are left, by their shares. Exit code 1 if anything
failed, 75 if something has had no time. REHEARSE=1 runs it without a GPU, on small models and over gloo.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from benchmarks._common import machine
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.runtime.parent import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
REHEARSED = bool(os.environ.get("REHEARSE"))
FEWEST_SECONDS = 10
"""Less time is given to nothing."""
GIB_OF_42 = 135
"""Memory of a card that holds 42 sequences of the 1.5B model."""
MODEL = "blackmamba_340m_1.5b"
SHOWN_LINES = 80


@dataclass(frozen=True)
class Check:
    """A command, which writes NAME.log, and why it cannot run here, if so."""

    name: str
    words: list[str]
    why_not: str = ""
    goes_on: bool = False
    """It is told its time limit, and goes on by itself in a second call."""


@dataclass(frozen=True)
class Part:
    title: str
    share: float
    checks: list[Check]


def module(name: str, *words: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, words)]


def tests(*words: str, side_by_side: bool = True) -> list[str]:
    """Return a command for pytest, which needs no plugin."""
    plain = ("-v", "-rs", "--tb=short", "-o", "addopts=", "-p", "no:cacheprovider", "--confcutdir=tests/gpu")
    return module(
        "pytest", *words, *plain, *(("-n", "8") if side_by_side and find_spec("xdist") and not REHEARSED else ())
    )


def parts(results: Path, carried: Path | None) -> dict[int, Part]:
    """Return everything to do, by number and in order."""
    step = partial(_step, results)
    big = not REHEARSED and torch.cuda.get_device_properties(0).total_memory > GIB_OF_42 * 2**30
    sanitizer = "" if which("compute-sanitizer") else "no compute-sanitizer here"
    few = ["tests/gpu/test_selective_scan.py", "-k", "do_without"]
    sanitize = ["compute-sanitizer", "--target-processes", "all", "--error-exitcode", "3"]
    sanitized = [
        Check(tool, [*sanitize, "--tool", tool, *tests(*few, "-x", side_by_side=False)], sanitizer)
        for tool in ("memcheck", "racecheck")
    ]
    old = carried / "old" if carried else None
    no_old = "" if old and old.is_dir() else "needs CARRIED/old: git archive REVISION megatron_blackmamba/ops"
    small = ["tiny", "--rows", 1, 2, "--prompt", 16, "--repeats", 2] if REHEARSED else []
    nccl = ["--only", "dp2", "--steps", 3, "--no-drills"] if REHEARSED else []
    no_gpu, corpus = "needs a GPU" if REHEARSED else "", carried / "corpus.tar.xz" if carried else None
    kernels = ("selective_scan", "decoding", "ssd", "delta", "gated_norm")
    before = "chunked" if REHEARSED else "triton"  # the scan that `auto` took until now
    no_sources = "" if carried and [*carried.glob("*.tar.gz")] else "needs the archives of gpu_carry.sh"
    alone = ["--kernels", 8, 64, 256, "--seconds", 0]
    corpus_words = ["--corpus", corpus] if corpus and corpus.is_file() else []
    return {
        1: Part("Correctness of what is new", 15, [
            Check("graphs", tests("tests/gpu/test_graphs.py")),
            Check("kernels", tests(*(f"tests/gpu/test_{name}.py" for name in kernels))),
            *sanitized,
        ]),
        2: Part("Layouts over NCCL on one card", 22, [
            Check("nccl", module("tests.gpu.nccl_layouts", "--results", results / "nccl.json", *nccl), goes_on=True),
        ]),
        3: Part("The training step", 23, [
            step("step", *(["--sequences", 42] if big else []), "--beside"),
            step("step_old", "--sequences", 18 if big else 6, "--fewer", "--beside", f"{MODEL}+kernels.scan={before}"),
            step("step_graph", "--sequences", 6, "--fewer", "--beside", f"{MODEL}+kernels.cuda_graph=off"),
            Check("versions", module("benchmarks.gpu_versions", old or "none"), no_gpu or no_old),
        ]),
        4: Part("Decoding", 14, [
            Check("generation", module("benchmarks.gpu_generation", *small, "--json", results / "generation.json")),
            Check("kernels_alone", module("benchmarks.gpu_generation", *alone), no_gpu),
            Check("lengths", module("benchmarks.gpu_generation_lengths", "--json", results / "lengths.json"), no_gpu),
        ]),
        5: Part("The 1.5B model by `blackmamba train`", 21, [
            Check("run", module("scripts.gpu_run", results / "run", *corpus_words), goes_on=True),
        ]),
        6: Part("The rest", 5, [
            Check("tests", tests("tests/gpu", "--deselect", "tests/gpu/test_graphs.py")),
            Check("build", ["bash", "scripts/gpu_peers.sh", str(carried)], no_gpu or no_sources),
            Check("agree", tests("tests/gpu", "-k", "installed"), no_gpu or no_sources),
            Check("peers", module("benchmarks.gpu_kernels", "--json", results / "kernels.json"), no_gpu),
            step("step_fp8", "--beside", f"{MODEL}+kernels.linear=fp8", "--fewer"),
        ]),
    }  # fmt: skip


def _step(results: Path, name: str, *words: object) -> Check:
    """Return the benchmark of a training step."""
    if REHEARSED:
        rest = [str(word).replace(MODEL, "tiny") for word in words]
        words = (*rest, "--length", 128, "--sequences", 2, "--repeats", 2)
    model = "tiny" if REHEARSED else MODEL
    return Check(name, module("benchmarks.gpu_step", model, *words, "--json", results / f"{name}.json"))


class Call:
    """One call: what is done already, and the time that is left."""

    def __init__(self, results: Path, minutes: float) -> None:
        self.results, self.until = results, time.monotonic() + 60 * minutes
        self.file = results / "state.json"
        self.done: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def run(self, check: Check, seconds: float) -> None:
        """Run a check that has not passed, and keep what came of it; the file is as of before until then."""
        if check.why_not:
            self._keep(check, {"result": f"not run: {check.why_not}"})
            return
        if self.done.get(check.name, {}).get("result") == "passed":
            return
        if seconds < FEWEST_SECONDS:
            self.done.setdefault(check.name, {"result": "no time"})
            return
        words = [*check.words, "--seconds", str(int(seconds) - 5)] if check.goes_on else check.words
        began, code = time.monotonic(), None
        with (self.results / f"{check.name}.log").open("w") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:  # as by Ctrl-C, so that it says where it was
                _end(process)
        result = {None: "cut", 0: "passed", 75: "cut"}.get(code, f"failed, exit code {code}")
        took = {"seconds": round(time.monotonic() - began), "date": time.strftime("%Y-%m-%d %H:%M")}
        self._keep(check, {"result": result, "command": shown(check.words), **took, "where": where()})

    def _keep(self, check: Check, found: dict[str, Any]) -> None:
        self.done[check.name] = found
        atomic.write_text(self.file, json.dumps(self.done, indent=1))


def _end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shown(words: list[str]) -> str:
    """Return a command as a user types it."""
    return shlex.join(["python" if word == sys.executable else word.removeprefix(f"{ROOT}/") for word in words])


def where() -> str:
    """Return the card, the versions and the commit."""
    here = machine("triton", "megatron-core", "mamba-ssm")
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    card = here["gpu"] or "no GPU (rehearsed)"
    if here["gpu"] and which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        card += f", driver {subprocess.run(asked, capture_output=True, text=True).stdout.split()[0]}"
    return f"{card}; {versions}; commit {commit()}"


def commit() -> str:
    """Return the commit, or what COMMIT says where the tree travelled without git."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("COMMIT") or asked.stdout.strip() or "unknown"


def table(part: Part, call: Call) -> str:
    """Return a part's results in Markdown: a row for each command, then the tables that they printed."""
    rows, blocks, places = [], [], []
    for check in part.checks:
        found = call.done.get(check.name, {"result": "no time"})
        rows.append(f"| {check.name} | {found['result']} | {found.get('seconds', '')} | {found.get('date', '')} |")
        if "command" in found:
            places.append(found["where"])
            lines = "\n".join(tables(call.results / f"{check.name}.log"))
            blocks.append(f"`{found['command']}`:\n\n```\n{lines}\n```\n")
    head = f"### {part.title}\n\n" + "".join(f"{place}\n\n" for place in dict.fromkeys(places))
    return head + "\n".join(["| check | result | s | date |", "|---|---|---|---|", *rows, "", *blocks])


def tables(log: Path) -> Iterator[str]:
    """Yield the end of a log without pytest's line for each test that passed, and without warnings."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    kept = [line for line in lines if " PASSED" not in line and " SKIPPED" not in line and "Warning" not in line]
    yield from kept[-SHOWN_LINES:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--carried", type=Path, help="folder that scripts/gpu_carry.sh made")
    parser.add_argument("--minutes", type=float, default=9, help="time limit of the whole call")
    parser.add_argument("--parts", type=int, nargs="+", choices=range(1, 7), default=list(range(1, 7)))
    options = parser.parse_args()
    if not torch.cuda.is_available() and not REHEARSED:
        sys.exit("gpu_check: PyTorch sees no CUDA device here; REHEARSE=1 runs it on CPUs, on small models")
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    carried, call = options.carried.resolve() if options.carried else None, Call(results, options.minutes)
    everything = parts(results, carried)
    print(where(), flush=True)
    wanted = [everything[number] for number in sorted(options.parts)]
    for place, part in enumerate(wanted):
        until = time.monotonic() + call.left * part.share / sum(each.share for each in wanted[place:])
        for check in part.checks:
            call.run(check, min(call.left, until - time.monotonic()))
        number = next(number for number, each in everything.items() if each is part)
        atomic.write_text(results / f"part_{number}.md", table(part, call))
        print(f"\n{table(part, call)}", flush=True)
        written = [results / f"part_{each}.md" for each in everything]
        atomic.write_text(results / "summary.md", "\n".join(file.read_text() for file in written if file.exists()))
    found = [call.done.get(check.name, {}).get("result", "no time") for part in wanted for check in part.checks]
    if any(result.startswith("failed") for result in found):
        return 1
    return 75 if {"cut", "no time"} & set(found) else 0


if __name__ == "__main__":
    sys.exit(main())
