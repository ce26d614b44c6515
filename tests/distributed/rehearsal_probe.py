"""What runs on one GPU with NCCL, here over gloo on forked ranks, with faults that the comparison must catch.

`python -m tests.distributed.rehearsal_probe FOLDER CASE...` answers with what `run_all` found of each case.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu import nccl_cases as cases
from tests.gpu.nccl_faults import FAULTS
from tests.gpu.nccl_layouts import Pool, Results, run_all
from tests.gpu.nccl_rank import serve
from tests.runtime.ranks import import_once

STEPS = 4
HANG_SECONDS = {"skipped_collective": 15.0, "sleeping_rank": 15.0}
PATIENCE = 300.0
LAYOUTS = {layout.name: layout for layout in cases.LAYOUTS}


class Fork:
    """A rank forked from this process, with the part of Popen's methods that the pool uses."""

    def __init__(self, here: Path, rank: int) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                serve(here, rank)
                code = 0
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


def run(folder: Path, name: str, results: Results) -> dict[str, Any]:
    """Run a layout, or the layout `dp2` with a fault; return its row."""
    fault = name if name in FAULTS else ""
    layout = LAYOUTS["dp2" if fault else name]
    task = cases.Task(layout, (cases.Variant("fp32"),))
    pool = Pool(folder / name, layout.ranks, HANG_SECONDS.get(name, PATIENCE), Fork)
    alone = cases.alone(layout.family, "fp32")
    try:
        run_all(pool, [alone], results, STEPS, PATIENCE, time.monotonic() + 600)
        run_all(pool, [task], results, STEPS, PATIENCE, time.monotonic() + 600, fault)
    finally:
        pool.close()
    return results.found["rows"].pop(task.keys[0])


def main(folder: Path, names: list[str]) -> None:
    import_once()
    results = Results(folder / "results.json")
    rows = {name: run(folder, name, results) for name in names}
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
