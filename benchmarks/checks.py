"""Measure the checks of a training step: a step of the loop with them beside one without, in turns.

    python -m benchmarks.checks [CONFIG] [a.b=c ...] [--nproc 2] [--repeats 100] [--json]

The checks: where a value that is not finite was first seen, each rank's own time (stragglers), the comparison of
shards with their manifests, and that of replicas. The last runs every `training.guard.replicas_every` steps: its own
time is divided by that. Without a configuration: the quickstart's.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import _common
from benchmarks._trainer import a_run
from benchmarks.train_step import step_of_loop

WITH, WITHOUT, REPLICAS = "with the checks", "without", "one comparison of replicas"


def main() -> None:
    parser = _common.arguments(__doc__, repeats=100)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    parser.add_argument("--nproc", type=int, default=2)
    options = parser.parse_args()
    if options.nproc > 1 and "RANK" not in os.environ:
        raise SystemExit(_start_workers(options.nproc))
    torch.set_num_threads(options.threads)
    result = measure(options)
    if os.environ.get("RANK", "0") == "0":
        _common.show(result, options.json)


def measure(options: Any) -> dict[str, Any]:
    """Return the table of both steps and of a comparison."""
    words = options.config if any("=" not in word for word in options.config) else ["quickstart", *options.config]
    with a_run(words) as (config, here, start):
        every = config.training.guard.replicas_every
        checked = start(name="with")
        with no_checks():
            plain = start(name="without")
        ways = {
            WITH: lambda: step_of_loop(checked),
            WITHOUT: lambda: step_of_loop(plain),
            REPLICAS: checked.watch.differing,
        }
        seconds = _common.interleaved(ways, repeats=options.repeats, device="the wall", patience=float("inf"))
    took = {name: _common.median(runs) for name, runs in seconds.items()}
    share = {
        "of a step": took[WITH] / took[WITHOUT] - 1,
        "of replicas": took[REPLICAS] / every / took[WITHOUT] if every else 0.0,
    }
    rows = [{"": name, "ms": 1e3 * took[name], "runs": len(runs)} for name, runs in seconds.items()]
    rows += [{"": f"the checks {name}, %", "ms": 100 * part, "runs": options.repeats} for name, part in share.items()]
    title = f"the checks in a step of {config.name}, {here.size} process(es)"
    return {"machine": _common.machine("megatron-core"), "tables": {title: rows}}


@contextmanager
def no_checks() -> Iterator[None]:
    """Build a trainer whose hooks do nothing."""
    from megatron_blackmamba.training.watch import stragglers
    from megatron_blackmamba.training.watch.finite import FirstSeen

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(stragglers, "_timed", lambda model: []))
        stack.enter_context(mock.patch.object(FirstSeen, "_before_layers", lambda self, decoder, inputs: None))
        yield


def _start_workers(processes: int) -> int:
    from megatron_blackmamba.formats.run_folder import RunFolder
    from megatron_blackmamba.training.launcher import launch

    with tempfile.TemporaryDirectory(prefix="checks_") as folder:
        command = [sys.executable, "-m", "benchmarks.checks", *sys.argv[1:]]
        return launch(command, processes, RunFolder(Path(folder)))


if __name__ == "__main__":
    main()
