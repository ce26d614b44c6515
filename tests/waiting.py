"""Wait for what another process is to bring about."""

import time
from typing import Protocol


class Started(Protocol):
    """Processes that a test started: a job of `Forks`, or a `Command`."""

    def ended(self) -> bool: ...

    def output(self) -> str: ...


class Command:
    """A process of a test, as `wait_until` takes it."""

    def __init__(self, process, output=lambda: ""):
        self.process, self.output = process, output

    def ended(self):
        return self.process.poll() is not None


def wait_until(condition, job: Started | None = None, seconds=900):
    """Wait for a condition. Where the job that is to bring it about has ended, fail at once with its output."""
    end = time.monotonic() + seconds
    while not condition():
        if job is not None and job.ended():
            assert condition(), f"the job has ended, and what the test waits for has not come:\n{job.output()}"
            return
        assert time.monotonic() < end, f"not within {seconds} s:\n{job.output() if job else ''}"
        time.sleep(0.02)
