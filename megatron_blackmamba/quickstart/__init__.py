"""The whole pipeline on one machine: local text, tokens, a trained model, a Hugging Face export, a sample, a report."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.progress import working
from megatron_blackmamba.quickstart.stages import STAGES, Quickstart, QuickstartError, begin, train
from megatron_blackmamba.training.keep.lock import Lock
from megatron_blackmamba.training.launcher import STOPPED_ON_REQUEST

LOCK = "lock"
"""In the folder: two commands would write the same files."""


def quickstart(folder: Path, minutes: float | None = None, fresh: bool = False) -> None:
    """Run every stage that is not done yet, saying what each did and how to do it by hand.

    minutes: how long to train; None is what the folder was begun with, and 4 in a new one.
    """
    _refuse_full_disk(folder)
    lock = Lock(folder / LOCK)
    try:
        if fresh:
            shutil.rmtree(folder)
            lock.restore()
        _run(begin(folder, minutes))
    finally:
        lock.release()


def _run(settings: Quickstart) -> None:
    from rich.console import Console

    console = Console(highlight=False)

    def say(text: str, **how: Any) -> None:
        console.print(text, markup=False, soft_wrap=True, **how)  # a command must survive copy and paste

    program, begun = _program(), time.monotonic()
    for number, stage in enumerate(STAGES, start=1):
        console.rule(f"[bold]{number}/{len(STAGES)}  {stage.title}", align="left")
        say(f"$ {stage.command(settings).replace('blackmamba', program, 1)}", style="dim")
        started = time.monotonic()
        try:
            shown = working(stage.title, quiet=stage.work is train)  # which shows its steps
            with interrupts.advice("run the same command again to go on"), shown:
                said = stage.work(settings)
        except KeyboardInterrupt:
            say("Stopped; nothing is lost: run the same command again to go on.")
            raise SystemExit(STOPPED_ON_REQUEST) from None
        say(said)
        say(f"{time.monotonic() - started:.0f} s", style="dim")
    console.rule(f"[bold]Done in {time.monotonic() - begun:.0f} s", align="left")
    say(
        f"Longer and better: {program} quickstart --minutes 20 --fresh\n"
        f"The paper's model: {program} plan blackmamba_1.5b --nodes 7 --gpus-per-node 8\n"
        f"All files are in {settings.folder}."
    )


def _program() -> str:
    """Return the `blackmamba` command to type here; its environment may not be on the PATH."""
    if shutil.which("blackmamba"):
        return "blackmamba"
    beside = Path(sys.executable).parent / "blackmamba"
    return os.path.relpath(beside) if beside.is_file() else f"{sys.executable} -m megatron_blackmamba"


def _refuse_full_disk(folder: Path, needed_gb: float = 1.0) -> None:
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free < needed_gb:
        raise QuickstartError(
            f"{there} has {free:.1f} GB free and the quickstart takes {needed_gb:g}: --folder elsewhere"
        )
