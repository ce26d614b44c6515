"""The argument CONFIG of the command line: files, names of shipped runs and overrides, and the run they describe."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_blackmamba.formats.run_folder import MANIFEST, RunFolder
from megatron_blackmamba.settings import RunConfig


def complete_config(incomplete: str) -> list[str]:
    """Return the shell's completions for CONFIG: shipped runs and keys. Without a match, the shell offers files."""
    from megatron_blackmamba.config import keys, shipped

    return [word for word in (*shipped(), *(f"{key}=" for key in keys())) if word.startswith(incomplete)]


ConfigArgument = typer.Argument(
    metavar="CONFIG|a.b=c",
    help="Run files or names of shipped runs (later ones win), then overrides.",
    autocompletion=complete_config,
)
Configs = Annotated[list[str], ConfigArgument]


def compose(arguments: list[str], quiet: bool = False, to_train: bool = False) -> RunConfig:
    """Turn files and overrides from the command line into a RunConfig.

    Args:
        quiet: Do not print notes about renamed or unread keys; the processes that this one starts print them.
        to_train: Refuse the config of a run that was moved, which would begin anew in the folder it had before. Warn of
            a new run that takes the model of a checkpoint without its weights.
    """
    from megatron_blackmamba.config.load import load, unread

    overrides = [a for a in arguments if "=" in a and not os.path.exists(a)]
    quiet |= os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"
    files = [a for a in arguments if a not in overrides]
    run = load(files, overrides, note=lambda line: note(line, quiet), to_train=to_train)
    for line in unread(run, overrides):
        note(line, quiet)
    if to_train and not (run.start.from_ or run.start.branch or RunFolder.of(run).latest.is_file()):
        for folder in (Path(file).parent for file in files if (Path(file).parent / MANIFEST).is_file()):
            line = f"warning: {run.name} takes its model's shape from {folder}, but starts from random weights"
            note(f"{line}: add start.from={folder} to start from its weights", quiet)
    return run


def note(line: str, quiet: bool) -> None:
    if not quiet:
        print(f"blackmamba: {line}", file=sys.stderr, flush=True)
