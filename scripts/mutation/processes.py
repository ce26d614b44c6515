"""Run pytest in the private copy, for a limited time, and leave no process of it behind."""

import contextlib
import ctypes
import json
import os
import select
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


class ForkServer:
    """Runs pytest in the private copy, forked from a process that has the slow imports behind it."""

    def __init__(self, tree: Tree, preload: list[str]):
        self.tree, self.preload = tree, preload
        self._process: subprocess.Popen | None = None

    def run(self, arguments: list[str], variables: dict[str, str], limit: float) -> tuple[int | None, str]:
        """Return pytest's exit code (None: the limit passed) and its output."""
        server = self._started()
        output = self.tree.work / "output.txt"
        options = [
            "-q",
            "--no-header",
            "-p",
            "mutation_plugin",
            "-p",
            "no:cacheprovider",
            f"--rootdir={self.tree.root}",
        ]
        options += [f"--basetemp={self.tree.work / 'temporary'}"]
        request = {"arguments": options + arguments, "variables": variables, "output": str(output)}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        try:
            ready, _, _ = select.select([server.stdout], [], [], limit)
        finally:
            self._end_others()
        code = int(server.stdout.readline())
        return code if ready else None, output.read_text(errors="replace")

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
            environment["PATH"] = f"{self.tree.environment / 'bin'}:{environment.get('PATH', '')}"
            environment.setdefault("OMP_NUM_THREADS", "1")
            self._process = subprocess.Popen(
                [str(self.tree.python), "-m", "mutation_forkserver", *self.preload],
                cwd=self.tree.root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        return self._process

    def _end_others(self) -> None:
        """Kill every process below this one except the server."""
        while others := [p for p in psutil.Process().children(recursive=True) if p.pid != self._process.pid]:
            for process in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(others, timeout=0.2)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._end_others()


def run_tests(server: ForkServer, limits: dict[str, float], limit: float) -> tuple[int | None, str, float]:
    """Run tests in this order, each with its own limit, until the first that fails."""
    wanted, named = server.tree.work / "tests.json", server.tree.work / "arguments"
    wanted.write_text(json.dumps(limits))
    named.write_text("\n".join(limits))
    began = time.monotonic()
    code, output = server.run(["-x", f"@{named}"], {"MUTATION_TESTS": str(wanted)}, limit)
    return code, output, time.monotonic() - began
