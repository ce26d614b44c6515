"""The verb `blackmamba study`, as the command line has it."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_blackmamba.console.options import taking
from megatron_blackmamba.study.options import HowToRun


@taking(HowToRun)
def study(
    name: Annotated[str, typer.Argument(help="A shipped study, such as paper or smoke, or a study file.")],
    options: HowToRun,
    folder: Annotated[Path | None, typer.Option(help="Folder of the study.", show_default="studies/NAME")] = None,
) -> None:
    """Train the runs of a study and compare them on one page. The same command resumes after a stop.

    Exit code 75: stopped, or waiting for Slurm jobs; run the same command again.

    [dim]blackmamba study smoke[/dim]

    [dim]blackmamba study paper --minutes 60[/dim]

    [dim]blackmamba study paper --page --png pictures[/dim]

    [dim]blackmamba study trend --budget 2 --jobs 1[/dim]
    """
    from megatron_blackmamba.runtime.exits import STOPPED_ON_REQUEST
    from megatron_blackmamba.study.commands import open_study
    from megatron_blackmamba.study.commands import run as run_study

    if options.slurm and (options.jobs is not None or options.minutes is not None):
        raise typer.BadParameter("--jobs and --minutes are for runs on this machine: leave out them or --slurm")
    if not options.slurm and (options.gpus, options.time, options.sbatch) != ("1", "4:00:00", ()):
        raise typer.BadParameter("--gpus, --time and --sbatch are for Slurm jobs: add --slurm")
    if not run_study(open_study(name, folder), options):
        raise typer.Exit(STOPPED_ON_REQUEST)
