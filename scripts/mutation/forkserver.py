"""Fork each pytest run from a process that has imported slow third-party modules: pytest's plugins and its arguments.

Runs in the private copy's environment: one JSON request per line on stdin, one exit code per line on stdout.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
from importlib.metadata import entry_points

import mutation_measure
import pytest


def serve() -> None:
    plugins = [entry.module for entry in entry_points(group="pytest11")]
    for name in [*sys.argv[1:], *plugins]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            child = os.fork()
            if child == 0:
                _run(json.loads(line))
            _, status = os.waitpid(child, 0)
            answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
            answers.flush()


def _run(request: dict) -> None:
    """Run pytest as if this process had just been started with the request's environment."""
    code = 1
    try:
        os.setsid()
        end_with_parent()
        log = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0), os.dup2(log, 1), os.dup2(log, 2)
        os.environ.update(request["variables"])
        mutation_measure.install()
        sys.argv = ["pytest", *request["arguments"]]
        code = pytest.main(request["arguments"])
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    serve()
