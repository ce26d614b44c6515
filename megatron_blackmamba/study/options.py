"""The options of a study."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class HowToRun:
    """How to train the runs of a study, and what to write."""

    jobs: Annotated[int | None, typer.Option(min=1, help="Number of parallel runs.", show_default="one per core")] = (
        None
    )
    minutes: Annotated[float | None, typer.Option(min=0.1, help="Save and stop after this many minutes.")] = None
    budget: Annotated[
        float | None,
        typer.Option(min=0, metavar="CORE_HOURS", help="Train only the points that this pays for, and list them."),
    ] = None
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit the runs as Slurm jobs of one node.")] = False
    gpus: Annotated[str, typer.Option(metavar="[TYPE:]N", help="GPUs per Slurm job; 0 trains on CPUs.")] = "1"
    time: Annotated[str, typer.Option(help="Time limit of each Slurm job.")] = "4:00:00"
    sbatch: Annotated[
        tuple[str, ...],
        typer.Option(metavar="OPTION", help="Extra sbatch option, for example --qos=high; repeatable."),
    ] = ()
    png: Annotated[Path | None, typer.Option(help="Also write the main charts as PNG files into this folder.")] = None
    points: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Points of another machine, which are not trained again; --page draws them."),
    ] = None
    page_only: Annotated[bool, typer.Option("--page", help="Only write the page about the finished runs.")] = False
    tables: Annotated[bool, typer.Option("--tables", help="Also print the tables of the page in Markdown.")] = False
