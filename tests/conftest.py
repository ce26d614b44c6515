"""For all tests: one thread a process, and no time limits on generated examples.

The longest groups begin first, so that no worker is left alone with one at the end.
"""

import atexit
import gc
import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
if (
    signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
):  # under nohup; tests close terminals, and children would inherit it
    os.environ["TESTS_UNDER_NOHUP"] = "1"
if "TESTS_UNDER_NOHUP" in os.environ:  # pytest's workers too
    signal.signal(signal.SIGHUP, lambda number, frame: None)

import pytest
from hypothesis import HealthCheck, settings

gc.set_threshold(*gc.get_threshold()[:2], 100)  # what collection imports stays
settings.register_profile("project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")

# By worker seconds, see `pytest --durations=0`. Slurm's tests are the longest by far: two groups, with a cluster each.
LONGEST_FIRST = ("slurm", "forks", "pages", "branches", "slurm_jobs", "layouts", "triton", "resharding", "rehearsal")
LONGEST_FIRST += ("command", "routers", "s3", "short_runs", "failing_saves", "world", "plan_memory")
LONGEST_FIRST += ("optimizer_kinds", "patches", "new_kind")


@pytest.fixture(scope="session")
def interpreted():
    """Call functions in the process in which Triton interprets its kernels."""
    from tests.ops.interpreted import interpreter

    pytest.importorskip("triton")
    with interpreter() as run:
        yield run


@pytest.fixture(scope="session")
def session(tmp_path_factory):
    """A shell whose `blackmamba` starts at once; each group that uses it has one of its own."""
    from tests.docs.session import Session

    session = Session(tmp_path_factory.mktemp("s"))
    yield session
    session.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest groups first. Within a group the order stays as it is."""

    def place(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        return LONGEST_FIRST.index(mark.args[0]) if mark and mark.args[0] in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


def pytest_runtest_setup() -> None:
    """Let a test without its own generator draw the same numbers each time, whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection: every look through them takes half a second."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton would list what it leaves behind
