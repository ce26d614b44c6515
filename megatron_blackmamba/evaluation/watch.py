"""Score checkpoints as they appear; training does not wait."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.checkpoint.following import handle_each
from megatron_blackmamba.config import read_saved
from megatron_blackmamba.evaluation.commands import run as evaluate_and_show
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.evaluate import Options
from megatron_blackmamba.formats.evaluations import claim
from megatron_blackmamba.formats.run_folder import RunFolder


def watch(run: Path, options: Options, score: Callable[[Path, Options], object] | None = None) -> None:
    """Score every checkpoint that the run keeps for ever, oldest first, and its last one, until the run is done.

    A run that keeps none for ever has every checkpoint scored.
    score: what to do with a checkpoint, by default score it here and print the table.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise EvaluationError(f"{run}: not a run, which --watch needs. Name a folder such as runs/NAME")
    every = read_saved(folder.config).checkpoint.keep_every
    handle_each(run, every, lambda step: _one(folder, step, options, score), EvaluationError, "scored")


def _one(folder: RunFolder, step: int, options: Options, score: Callable[[Path, Options], object] | None) -> None:
    """Score one checkpoint, protected from removal."""
    path = folder.checkpoint(step)
    with claim(folder.root, step):
        if not (path / manifest.NAME).is_file():  # removed just before the claim
            return
        if score is not None:
            score(path, options)
        else:
            evaluate_and_show(path, replace(options, out=None), as_json=False)
