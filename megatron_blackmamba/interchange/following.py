"""Export checkpoints beside training, as they appear."""

import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_blackmamba.checkpoint import manifest
from megatron_blackmamba.checkpoint.following import handle_each
from megatron_blackmamba.config import read_saved
from megatron_blackmamba.formats.evaluations import claim
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange.canonical import InterchangeError

Export = Callable[[Path, Path, Callable[[], None]], None]
"""Exports a checkpoint to a folder, and calls the function regularly."""


def export_every(run: Path, out: Path, every: int, export: Export) -> None:
    """Export the checkpoint of every `every` steps to `out/step_N`, and the last one, until the run is done.

    Exports that are there are not made again, so a killed call continues where it was.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise InterchangeError(f"{run}: not a run, which --every needs. Name a folder such as runs/NAME")
    saved = read_saved(folder.config).checkpoint.every
    if saved and every % saved:
        raise InterchangeError(f"--every {every}: the run saves every {saved} steps. Give a multiple of {saved}")
    with _alone(out):
        handle_each(run, every, lambda step: _one(folder, step, out, export), InterchangeError, "exported")


def _one(folder: RunFolder, step: int, out: Path, export: Export) -> None:
    """Export one checkpoint, protected from removal."""
    checkpoint = folder.checkpoint(step)
    target = out / checkpoint.name
    for unfinished in out.glob(f".{target.name}.????????.tmp"):  # of a killed call of an earlier version
        shutil.rmtree(unfinished)
    if target.exists():
        return
    with claim(folder.root, step) as renew:
        if not (checkpoint / manifest.NAME).is_file():
            print(f"blackmamba: step {step}: was deleted before its export", file=sys.stderr, flush=True)
            return
        export(checkpoint, target, renew)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Refuse a second process that exports to the same folder."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InterchangeError(f"{out}: another process exports to this folder. Choose another one") from None
        yield
