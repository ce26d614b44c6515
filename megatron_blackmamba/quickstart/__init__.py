"""The whole way on one machine: this machine's own text, tokens, a trained model, Hugging Face, a sample, a report."""

import os
import shutil
import time
from pathlib import Path

from megatron_blackmamba.quickstart.stages import STAGES, Quickstart, QuickstartError

__all__ = ["QuickstartError", "quickstart"]


def quickstart(folder: Path, minutes: float, fresh: bool = False) -> None:
    """Run every stage that is not done yet, saying what each did and how to do it by hand."""
    from rich.console import Console

    console = Console(highlight=False)
    _refuse_full_disk(folder)
    if fresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = Quickstart(folder, minutes, processes=2 if len(os.sched_getaffinity(0)) > 1 else 1)
    begun = time.monotonic()
    for number, stage in enumerate(STAGES, start=1):
        console.rule(f"[bold]{number}/{len(STAGES)}  {stage.title}", align="left")
        console.print(f"$ {stage.command(settings)}", style="dim", markup=False)
        started = time.monotonic()
        console.print(stage.work(settings), markup=False)
        console.print(f"{time.monotonic() - started:.0f} s", style="dim")
    console.rule(f"[bold]Done in {time.monotonic() - begun:.0f} s", align="left")
    console.print(
        f"Longer and better: blackmamba quickstart --minutes 20 --fresh\n"
        f"The paper's model: blackmamba plan blackmamba_1.5b --nodes 7 --gpus-per-node 8\n"
        f"Everything lies in {folder}.",
        markup=False,
    )


def _refuse_full_disk(folder: Path, needed_gb: float = 1.0) -> None:
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free < needed_gb:
        raise QuickstartError(
            f"{there} has {free:.1f} GB free and the quickstart takes {needed_gb:g}: --folder elsewhere"
        )
