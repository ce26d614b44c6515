"""Score checkpoints as they appear; training does not wait."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.config import read_saved
from megatron_blackmamba.evaluation.commands import run as evaluate_and_show
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.evaluate import Options
from megatron_blackmamba.formats.evaluations import claim
from megatron_blackmamba.formats.run_folder import RunFolder

POLL_SECONDS = 30.0


def watch(run: Path, options: Options, score: Callable[[Path, Options], object] | None = None) -> None:
    """Score every checkpoint that the run keeps, oldest first, until the run is done.

    score: what to do with a checkpoint, by default score it here and print the table.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise EvaluationError(f"{run}: not a run, which --watch needs. Name a folder such as runs/NAME")
    handled: set[int] = set()
    waiting = False
    while True:
        done = folder.done.exists()  # before the look at the checkpoints: the last one is published first
        new = [step for step in kept_steps(folder, done) if step not in handled]
        for step in new:
            _one(folder, step, options, score)
            handled.add(step)
        if done and not new:
            return
        if not new and not waiting:
            print(f"blackmamba: waiting for the next checkpoint of {run}", file=sys.stderr, flush=True)
        waiting = not new
        if not new:
            time.sleep(POLL_SECONDS)


def kept_steps(folder: RunFolder, done: bool) -> list[int]:
    """Return the checkpoints that the run keeps for ever, and its last one once it is done.

    A run that keeps none for ever has every checkpoint scored.
    """
    every = read_saved(folder.config).checkpoint.keep_every
    steps = sorted(
        step
        for path in folder.checkpoints.glob("step_*")
        if (path / manifest.NAME).is_file() and (step := manifest.step_in_name(path)) is not None
    )
    return [step for step in steps if not every or step % every == 0 or (done and step == steps[-1])]


def _one(folder: RunFolder, step: int, options: Options, score: Callable[[Path, Options], object] | None) -> None:
    """Score one checkpoint, protected from removal; report an error and go on with the next."""
    path = folder.checkpoint(step)
    with claim(folder.root, step):
        if not (path / manifest.NAME).is_file():  # removed just before the claim
            return
        try:
            if score is not None:
                score(path, options)
            else:
                evaluate_and_show(path, replace(options, out=None), as_json=False)
        except (EvaluationError, manifest.CheckpointError) as error:
            print(f"blackmamba: step {step}: {error}", file=sys.stderr, flush=True)
