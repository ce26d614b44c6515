"""Run modules of the tests in forks of one process that has imported torch and megatron-core already.

As a program this is that process; `Warm` is the test's end of it. It ends when the test process does.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys

from tests.runtime.ranks import ROOT, environment, import_once


class Warm:
    """Start modules without waiting for imports. A module is alone in a session, as `python -m` would be."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.runtime.warm"]
        self._process = subprocess.Popen(
            command, env=environment(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def run(self, module: str, arguments: tuple[str, ...], out: str, err: str) -> int:
        """Run the module to its end with its output in files; return its exit code as `subprocess` gives it."""
        question = {"words": [module, *arguments], "environment": environment(), "output": [out, err]}
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        pid = self._read()
        try:
            return self._read()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            raise

    def _read(self) -> int:
        line = self._process.stdout.readline()
        assert line, "the process that forks modules has ended"
        return int(line)


def _serve() -> list[str] | None:
    """Fork a process for every question; return the words of the module to run in it, and None at the end."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers, os.fdopen(os.dup(0), "rb") as questions:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        import_once()
        for line in questions:
            question = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                for number, file in enumerate(question["output"], 1):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
                os.environ.clear()
                os.environ.update(question["environment"])
                return question["words"]
            answers.write(b"%d\n" % pid)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # until it is reaped, its id belongs to it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            answers.write(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return None


if __name__ == "__main__":
    words = _serve()
    if words is not None:
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
