"""Train layouts of 2 to 8 ranks on one GPU with NCCL, and compare each with one process.

    python -m tests.gpu.nccl_layouts --results FILE [--seconds 150] [--only NAME...] [--mps] [--no-drills]
    python -m tests.gpu.nccl_layouts --plan     # needs no GPU: estimated minutes

Ranks that share a GPU are slow, and their times say nothing about several GPUs. Streams, asynchronous collectives and
their order are the real ones. Every layout trains 20 steps in fp32, with overlap and then without (`apart`), and after
that in bf16; a slow one takes fewer. `rounding` stands beside its difference to one process: how far the losses of one
process move if the outputs of its layers round otherwise. Drills run whole commands: a rank is killed and the run
resumes on another layout, and a rank stops.

Results are kept in FILE as they come, and a second call goes on with what is missing or failed. Exit code 1 if anything
that ran failed, 75 if something is left. REHEARSE=1 runs the same over gloo on a machine without a GPU.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.runtime.device import SHARED
from megatron_blackmamba.runtime.exits import HUNG
from megatron_blackmamba.runtime.parent import follow_parent
from megatron_blackmamba.runtime.ports import free_port
from tests.gpu import nccl_cases as cases
from tests.gpu import nccl_drills
from tests.gpu.nccl_cases import Task, Variant

ROOT = Path(__file__).resolve().parents[2]
MPS = "nvidia-cuda-mps-control"
Row = dict[str, Any]
COMPARED = ("losses", "norms", "routed")
MOST_FAILURES = 4
"""Layouts that may fail in a row by an error or a hang before the rest is left out, since it would fail too."""
START_SECONDS, DRILL_SECONDS = 17, 90
"""Eight processes that import PyTorch, measured on an H100; both drills side by side, assumed."""
DRILLS_SHARE = 0.25
"""Of the time, for each drill at most, before the layouts begin beside it."""
NCCL = {
    SHARED: "1",
    "NCCL_DEBUG": "WARN",
    "NCCL_MAX_NCHANNELS": "2",  # what spins on the GPU keeps other ranks from computing
    "NCCL_BUFFSIZE": "1048576",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
COLUMNS = ("layout", "variant", "ranks", "loss 1", "losses", "rounding", "norm 1", "same experts", "replicas")
COLUMNS += ("s/step", "s", "start")
WIDTHS = (19, 12, 5, 8, 8, 8, 8, 12, 12, 7, 6, 5)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, prepared for ranks that share a GPU."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**NCCL, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | clean | {"PYTHONPATH": path} | more


class Pool:
    """Processes that train one layout after another, so that each imports torch and starts CUDA once."""

    def __init__(
        self, folder: Path, ranks: int, hang_seconds: float, start: Any = None, more: dict[str, str] | None = None
    ) -> None:
        self.folder, self.ranks, self.hang_seconds = folder, ranks, hang_seconds
        self.start_rank, self.more = start or self._spawn, more or {}
        self.began = 0
        self._begin()

    def _begin(self) -> None:
        self.number = 0
        self.began += 1
        self.here = self.folder / f"pool-{self.began}"
        self.here.mkdir(parents=True)
        self.processes = [self.start_rank(self.here, rank) for rank in range(self.ranks)]

    def _spawn(self, here: Path, rank: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.gpu.nccl_rank", str(here), str(rank)]
        return subprocess.Popen(
            command,
            env=environment(**self.more),
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=partial(follow_parent, os.getpid()),
        )

    def run(self, task: Task, steps: int, seconds: float, until: float, fault: str = "") -> list[Row] | str:
        """Train; return for each variant what all ranks saw, or what went wrong. A pool that failed begins anew."""
        number, port = self.number, free_port()
        self.number += 1
        layout = task.layout
        hang_seconds = self.hang_seconds * (2 if layout.ranks == 1 else 1)  # one process compiles most kernels
        request = {
            "ranks": layout.ranks,
            "family": layout.family,
            "overrides": layout.overrides,
            "steps": steps,
            "seconds": seconds * (4 if layout.ranks == 1 else 1),  # the others are compared with all of its steps
            "variants": [asdict(variant) | {"overrides": variant.overrides} for variant in task.variants],
            "port": port,
            "hang_seconds": hang_seconds,
            "fault": fault,
        }
        atomic.write_text(self.here / f"request-{number}.json", json.dumps(request))
        files = [self.here / f"answer-{number}-{rank}.json" for rank in range(layout.ranks)]
        problem = self._wait(files, until)
        answers = {rank: json.loads(file.read_text()) for rank, file in enumerate(files) if file.exists()}
        errors = [f"rank {rank}: {answer['trace']}" for rank, answer in answers.items() if "error" in answer]
        if errors or problem:
            spoke = {rank for rank, answer in answers.items() if "error" in answer}
            report = "\n".join([*errors, *filter(None, [problem]), *self._reports(port), *self._last_words(spoke)])
            self.close()
            self._begin()
            return report
        return [
            {"ranks": [answers[rank]["variants"][place] for rank in range(layout.ranks)]}
            for place in range(len(task.variants))
        ]

    def _wait(self, files: list[Path], until: float) -> str | None:
        """Wait for the answers; return why they do not come."""
        failed_at = None
        while not all(file.exists() for file in files):
            now = time.monotonic()
            if now > until:
                return "out of time"
            codes = {rank: self.processes[rank].poll() for rank in range(len(files))}
            failed = {rank: code for rank, code in codes.items() if code is not None}
            if failed:
                failed_at = failed_at or now
                if now > failed_at + min(10.0, self.hang_seconds):  # the others may still say something
                    return ", ".join(f"rank {rank} ended with code {code}" for rank, code in failed.items())
            time.sleep(0.02)
        return None

    def _reports(self, port: int) -> Iterable[str]:
        """Yield the first lines of a report of a hang."""
        for report in sorted((self.here / f"logs-{port}").glob("hang-*/rank-*.txt"))[:1]:
            yield report.read_text().partition("\nStacks of")[0]

    def _last_words(self, spoke: set[int]) -> Iterable[str]:
        """Yield the last lines that failed ranks have printed, such as NCCL's warnings."""
        for rank in range(self.ranks):
            file = self.here / f"rank-{rank}.log"
            lines = [line for line in file.read_text(errors="replace").splitlines() if line] if file.exists() else []
            if lines and (rank in spoke or self.processes[rank].poll() not in (None, 0, HUNG)):
                yield f"rank {rank} said:\n    " + "\n    ".join(lines[-12:])

    def close(self) -> None:
        """End the ranks."""
        (self.here / "end").touch()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


@contextmanager
def mps(folder: Path, wanted: bool) -> Iterator[dict[str, str]]:
    """Run NVIDIA's Multi-Process Service meanwhile, if wanted and possible; yield the variables of its clients.

    Without it the processes on a GPU take turns of milliseconds, and each collective waits for many turns.
    """
    variables = {name: str(folder / name.lower()) for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    problem = _start_mps(variables) if wanted else "not asked for"
    say(f"MPS: {problem or 'on'}")
    try:
        yield {} if problem else variables
    finally:
        if wanted:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([MPS], input=b"quit\n", env=os.environ | variables, capture_output=True, timeout=10)


def _start_mps(variables: dict[str, str]) -> str:
    """Start the service and try it; return why it does not work."""
    for place in variables.values():
        Path(place).mkdir()
    try:
        subprocess.run([MPS, "-d"], env=os.environ | variables, capture_output=True, timeout=10, check=True)
        trial = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
        tried = subprocess.run(trial, env=os.environ | variables, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available: {error}"
    return f"does not work here: {tried.stderr[-300:]}" if tried.returncode else ""


def compare(alone: Row, nudged: Row, found: Row, precision: str) -> Row:
    """Return how far a layout is from one process, and what is wrong about it."""
    many = found["ranks"][0]
    steps = len(many["losses"])
    one, twin = ({name: row["ranks"][0][name][:steps] for name in COMPARED} for row in (alone, nudged))
    problems = []
    if any(rank["losses"] != many["losses"] for rank in found["ranks"]):
        problems.append("ranks report different losses")
    differences = [abs(a - b) for a, b in zip(one["losses"], many["losses"], strict=True)]
    moved = [abs(a - b) for a, b in zip(one["losses"], twin["losses"], strict=True)]
    norm = abs(one["norms"][0] - many["norms"][0]) / one["norms"][0]
    norm_moved = abs(one["norms"][0] - twin["norms"][0]) / one["norms"][0]
    same = _agreeing(one, many)
    for what, value, bound, rounding in (
        ("loss of step 1", differences[0], cases.FIRST_LOSS, moved[0]),
        ("gradient norm of step 1", norm, cases.FIRST_NORM, norm_moved),
        ("losses", max(differences), cases.LOSSES, max(moved)),
        ("losses before a token changes experts", max(differences[:same], default=0), cases.UNTIL_REROUTED, 0.0),
    ):
        allowed = max(bound[precision], cases.REPRODUCED * rounding)
        if not value <= allowed:
            problems.append(f"{what}: {value:.1e} from one process, {allowed:.1e} is allowed")
    if steps >= cases.STEPS and not many["losses"][-1] < many["losses"][0] - 0.1:
        problems.append("does not learn")
    differing = next((rank["differing"] for rank in found["ranks"] if rank["differing"]), None)
    if differing:
        problems.append(f"replicas differ: {differing}")
    if not many["replicated"]:
        problems.append("has no replica to compare")
    return {
        "loss_1": differences[0],
        "losses": max(differences),
        "rounding": max(moved),
        "norm_1": norm,
        "same_experts": same,
        "steps": steps,
        "replicas": many["replicated"],
        "seconds_a_step": sorted(many["seconds"])[len(many["seconds"]) // 2],
        "took": many["took"],
        "joined": many["joined"],
        "curve": many["losses"],
        "problems": problems,
    }


def _agreeing(a: Row, b: Row) -> int:
    """Return the number of steps before the first in which an expert gets another number of tokens."""
    same = [x == y for x, y in zip(a["routed"], b["routed"], strict=True)]
    return same.index(False) if False in same else len(same)


class Results:
    """Results in a file, written after each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, dict[str, Any]] = {"rows": {}, "alone": {}, "drills": {}}
        if file.exists():
            self.found |= json.loads(file.read_text())
        self._lock = threading.Lock()

    def put(self, part: str, key: str, value: Row) -> None:
        """Keep a result."""
        with self._lock:
            self.found[part][key] = value
            self.file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.file, json.dumps(self.found))

    def passed(self, part: str, key: str, steps: int = 0, seconds: float = 0.0) -> bool:
        """Return whether there is a result without problems, of this many steps or of as much time."""
        found = self.found[part].get(key, {"problems": ["missing"]})
        return not found["problems"] and (found.get("steps", steps) >= steps or found["limit"] >= seconds)


def say(text: str) -> None:
    print(text, flush=True)


def line(cells: Iterable[str]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def shown(task: Task, variant: Variant, row: Row) -> str:
    layout = task.layout
    cells = [layout.name, str(variant), str(layout.ranks)]
    cells += [f"{row[name]:.1e}" for name in ("loss_1", "losses", "rounding", "norm_1")]
    cells += [f"{row['same_experts']} of {row['steps']}", f"{row['replicas']} alike", f"{row['seconds_a_step']:.3f}"]
    problems = "".join(f"\n    FAILED: {problem}" for problem in row["problems"])
    return line([*cells, f"{row['took']:.1f}", f"{row['joined']:.1f}"]) + problems


def run_all(
    pool: Pool, todo: list[Task], results: Results, steps: int, seconds: float, until: float, fault: str = ""
) -> dict[str, int]:
    """Run what is missing; return how many variants passed, failed, and were not run."""
    counts, in_a_row = {"passed": 0, "failed": 0, "not run": 0}, 0
    ordered = sorted(todo, key=lambda task: any(key in results.found["rows"] for key in task.keys))  # failed ones last
    say(line(COLUMNS))
    for task in ordered:
        part = "alone" if task.layout.ranks == 1 else "rows"
        if all(results.passed(part, key, steps, seconds) for key in task.keys):
            counts["passed"] += len(task.keys)
            if part == "rows":
                for key, variant in zip(task.keys, task.variants, strict=True):
                    say(shown(task, variant, results.found["rows"][key]) + "  (earlier)")
            continue
        if time.monotonic() > until or in_a_row == MOST_FAILURES:
            counts["not run"] += len(task.keys)
            continue
        if part == "rows" and fault == "" and not all(map(results.found["alone"].get, _needed(task))):
            say(f"{task.layout.name}: not run, since one process failed")
            counts["not run"] += len(task.keys)
            continue
        began = time.monotonic()
        found = pool.run(task, steps, seconds, until, fault)
        if isinstance(found, str):
            late = found.startswith("out of time")
            in_a_row += 1
            counts["not run" if late else "failed"] += len(task.keys)
            say(f"{task.layout.name} ({', '.join(map(str, task.variants))}): " + found.replace("\n", "\n    "))
            for key in [] if late or part == "alone" else task.keys:
                results.put("rows", key, {"problems": [found[-4000:]]})
            continue
        in_a_row = 0
        for key, variant, each in zip(task.keys, task.variants, found, strict=True):
            if part == "alone":
                results.put("alone", key, {"ranks": each["ranks"], "problems": []})
                counts["passed"] += 1
                continue
            of_alone = [results.found["alone"][name] for name in _of_alone(task, variant)]
            row = compare(*of_alone, each, variant.precision) | {"limit": seconds}
            results.put("rows", key, row)
            counts["failed" if row["problems"] else "passed"] += 1
            say(shown(task, variant, row))
        if part == "alone":
            say(f"{task.layout.name}: {time.monotonic() - began:.1f} s")
    return counts


def run_drill(name: str, folder: Path, results: Results, until: float) -> None:
    """Run a drill that has not passed, and say what came of it."""
    if results.passed("drills", name):
        return
    here, began = folder / name, time.monotonic()
    if name in results.found["drills"]:  # it failed
        shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True, exist_ok=True)
    try:
        found = nccl_drills.DRILLS[name](here, nccl_drills.starter(here, environment, until))
    except nccl_drills.OutOfTime as late:
        say(f"drill {name}: out of time after {time.monotonic() - began:.0f} s; it had said\n    {late}")
        return
    except Exception as error:  # a drill must not take the rest with it
        found = {"problems": [f"{type(error).__name__}: {error}"]}
    results.put("drills", name, found)
    seen = ", ".join(f"{key}: {value}" for key, value in found.items() if key != "problems")
    problems = "".join(f"\n    FAILED: {problem}" for problem in found["problems"])
    say(f"drill {name}: {seen}, {time.monotonic() - began:.0f} s{problems}")


def plan(todo: list[Task], steps: int, limit: float, drills: bool) -> str:
    """Return how many minutes a card needs until each kind of variants is done, calculated."""
    until, counts = START_SECONDS + (DRILL_SECONDS if drills else 0), dict[str, tuple[int, float]]()
    for task in todo:
        until += cases.seconds(task, steps, limit)
        if task.layout.ranks > 1:
            for variant in task.variants:
                counts[str(variant)] = counts.get(str(variant), (0, 0.0))[0] + 1, until
    lines = [f"{count} layouts in {kind}: done after {end / 60:.1f} min" for kind, (count, end) in counts.items()]
    return "\n".join(["calculated, for one H100:", *lines])


def _of_alone(task: Task, variant: Variant) -> list[str]:
    return [f"{task.layout.family}_alone {Variant(variant.precision, nudged=nudged)}" for nudged in (False, True)]


def _needed(task: Task) -> list[str]:
    return [name for variant in task.variants for name in _of_alone(task, variant)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JSON file of the results; a second call goes on")
    parser.add_argument("--seconds", type=float, default=150, help="time limit of the whole call")
    parser.add_argument("--steps", type=int, default=cases.STEPS)
    parser.add_argument("--variant-seconds", type=float, default=4, help="take fewer steps of a layout if slower")
    parser.add_argument(
        "--mps", action="store_true", help="start NVIDIA's MPS for this call: ranks compute side by side"
    )
    parser.add_argument("--only", nargs="+", help="names of layouts; default: all")
    parser.add_argument("--hang-seconds", type=float, default=40)
    parser.add_argument("--plan", action="store_true", help="print the estimated minutes on a card, and end")
    parser.add_argument("--no-drills", action="store_true", help="skip the killed and the stopped rank")
    options = parser.parse_args(arguments)
    layouts = [layout for layout in cases.LAYOUTS if not options.only or layout.name in options.only]
    if options.plan:
        say(plan(cases.tasks(layouts), options.steps, options.variant_seconds, not options.no_drills))
        return 0
    if options.results is None:
        parser.error("give --results FILE")
    began = time.monotonic()
    if not torch.cuda.is_available() and not os.environ.get("REHEARSE"):
        say("nccl_layouts: PyTorch sees no CUDA device here; REHEARSE=1 runs the same over gloo")
        return 2
    results = Results(options.results)
    until = began + options.seconds - 3
    say(f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPUs, gloo'}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="nccl_layouts_") as folder:
        kept = options.results.with_suffix(".drills")  # a drill that was cut goes on in the next call
        drills = [
            threading.Thread(target=run_drill, args=(name, kept, results, until), daemon=True)
            for name in ([] if options.no_drills else nccl_drills.DRILLS)
        ]
        for drill in drills:
            drill.start()
        for drill in drills:  # layouts come later: eight ranks that spin took the drills more time than there was
            drill.join(options.seconds * DRILLS_SHARE)
        with mps(Path(folder), options.mps) as more:
            pool = Pool(Path(folder), max(layout.ranks for layout in layouts), options.hang_seconds, more=more)
            try:
                counts = run_all(pool, cases.tasks(layouts), results, options.steps, options.variant_seconds, until)
            finally:
                pool.close()
        for drill in drills:
            drill.join(max(0.0, until - time.monotonic()) + 2)
        states = [results.found["drills"].get(name) for name in nccl_drills.DRILLS if drills]
        counts["passed"] += sum(state is not None and not state["problems"] for state in states)
        counts["failed"] += sum(state is not None and bool(state["problems"]) for state in states)
        counts["not run"] += states.count(None)
    say(", ".join(f"{count} {what}" for what, count in counts.items()) + f", {time.monotonic() - began:.0f} s")
    return 1 if counts["failed"] else 75 if counts["not run"] else 0


if __name__ == "__main__":
    sys.exit(main())
