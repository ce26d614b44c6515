"""Run pytest in the private copy, for a limited time, and leave no process of it behind."""

import ctypes
import json
import os
import signal
import subprocess
import time

import psutil

from .tree import Tree

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Become the parent of processes that lose theirs, so that `end_all` finds the ranks a test left behind."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_all() -> None:
    """Kill every process below this one."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
                child.wait(0.1)
            except (psutil.NoSuchProcess, psutil.TimeoutExpired):
                pass


def run_limited(tree: Tree, arguments: list[str], variables: dict[str, str], limit: float) -> tuple[int | None, str]:
    """Run pytest on `arguments`; return its exit code (None: the limit passed) and its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{tree.environment / 'bin'}:{environment.get('PATH', '')}"
    named = tree.work / "arguments"
    named.write_text("\n".join(arguments))
    options = ["-x", "-q", "--no-header", "-p", "mutation_plugin", "-p", "no:cacheprovider", f"--rootdir={tree.root}"]
    if "MUTATION_RECORD" in variables:
        options.remove("-x")
    output = tree.work / "output.txt"
    with open(output, "wb") as log:
        process = subprocess.Popen(
            [str(tree.python), "-m", "pytest", *options, f"@{named}"],
            cwd=tree.root,
            env=environment | variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all()
            process.wait()
    return code, output.read_text(errors="replace")


def run_tests(tree: Tree, limits: dict[str, float], limit: float) -> tuple[int | None, str, float]:
    """Run tests, each with its own limit, until the first that fails."""
    wanted = tree.work / "tests.json"
    wanted.write_text(json.dumps(limits))
    began = time.monotonic()
    code, output = run_limited(tree, list(limits), {"MUTATION_TESTS": str(wanted)}, limit)
    return code, output, time.monotonic() - began
