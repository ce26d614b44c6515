"""Measure which lines this process runs, if its environment's `context` file says for which test.

Every Python process of the private copy imports this at start-up, even if a test forked it or changed its environment.
coverage's own `patch = subprocess` passes its settings in environment variables, which are lost there.
"""

import atexit
import os
import sys
from pathlib import Path

WORK = Path(sys.prefix).parent
CONTEXT = WORK / "context"
running = None  # the coverage.Coverage of this process

sys.dont_write_bytecode = True  # the copy is compiled once, with hashes; mutants are compiled in memory


def begin() -> None:
    global running
    from coverage import Coverage

    try:
        context = CONTEXT.read_text()
    except OSError:  # the measurement ended while this process started
        return
    folder = WORK / "measurements"
    folder.mkdir(exist_ok=True)
    tree = WORK / "tree"
    running = Coverage(
        data_file=str(folder / "lines"),
        data_suffix=True,
        include=[f"{tree}/*"],
        context=context or None,
        config_file=False,
    )
    running._warn_no_data = False
    running._warn_preimported_source = False
    running.start()


def save() -> None:
    if running is not None:
        running.stop()
        running.save()


def after_fork() -> None:
    if running is not None:
        running.stop()
        begin()


def save_before(function):
    def saved(*arguments):
        save()
        return function(*arguments)

    return saved


def install() -> None:
    if not CONTEXT.exists():
        return
    begin()
    atexit.register(save)
    os.register_at_fork(after_in_child=after_fork)
    os._exit, os.execv, os.execve = (save_before(f) for f in (os._exit, os.execv, os.execve))


install()
