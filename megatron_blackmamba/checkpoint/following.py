"""The checkpoints that a run keeps, one after another as they appear; training does not wait."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.formats.run_folder import RunFolder

POLL_SECONDS = 30.0


def handle_each(run: Path, every: int, handle: Callable[[int], None], error: type[ValueError], what: str) -> None:
    """Call `handle` with each step that `follow` yields; report unusable checkpoints and go on.

    error: what `handle` raises, beside `CheckpointError`, and this function in the end if a checkpoint was unusable.
    what: what is done with a checkpoint, for that message, such as exported.
    """
    failed, count = [], 0
    for step in follow(run, every):
        count += 1
        try:
            handle(step)
        except (error, manifest.CheckpointError) as found:
            print(f"blackmamba: step {step}: {found}", file=sys.stderr, flush=True)
            failed.append(step)
    if failed:
        steps = ", ".join(map(str, failed))
        raise error(f"{len(failed)} of {count} checkpoints of {run} were not {what}: {steps}. See the errors above")


def follow(run: Path, every: int) -> Iterator[int]:
    """Yield the steps of a run's checkpoints, oldest first, until the run is done.

    every: Steps between those that are wanted; the last one of a finished run is wanted too. 0 means all.
    """
    folder = RunFolder(run)
    handled: set[int] = set()
    waiting = False
    while True:
        done = folder.done.exists()  # before the look at the checkpoints: the last one is published first
        new = [step for step in kept_steps(folder, done, every) if step not in handled]
        for step in new:
            yield step
            handled.add(step)
        if done and not new:
            return
        if not new and not waiting:
            print(f"blackmamba: waiting for the next checkpoint of {run}", file=sys.stderr, flush=True)
        waiting = not new
        if not new:
            time.sleep(POLL_SECONDS)


def kept_steps(folder: RunFolder, done: bool, every: int) -> list[int]:
    """Return the complete checkpoints whose steps are multiples of `every`, and the last one of a finished run."""
    steps = sorted(
        step
        for path in folder.checkpoints.glob("step_*")
        if (path / manifest.NAME).is_file() and (step := manifest.step_in_name(path)) is not None
    )
    return [step for step in steps if not every or step % every == 0 or (done and step == steps[-1])]
