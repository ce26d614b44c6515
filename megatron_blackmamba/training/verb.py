"""The verb `blackmamba train`, as the command line has it."""

import os
import re
import signal
import sys
import threading
from typing import Annotated

import typer

from megatron_blackmamba.config.arguments import Configs, compose
from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.runtime.exits import INTERRUPTED, RESTARTS

MOST_PER_CORE = 16
"""Processes of --nproc for each core: more of them end in a machine without memory."""


def train(
    configs: Configs,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Number of processes on this machine.", show_default="join torchrun or srun"
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0.001, help="Save and stop after this many minutes.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="With --nproc: restarts after a crash or hang between two checkpoints.")
    ] = RESTARTS,
    node: Annotated[
        str | None,
        typer.Option(
            metavar="K/M",
            help="With --nproc: this is machine K, from 0, of M. MASTER_ADDR names machine 0; no restarts here.",
            show_default="one machine",
        ),
    ] = None,
) -> None:
    """Train, or resume a run from its newest checkpoint.

    Ctrl-C, SIGTERM, SIGUSR1, a closed terminal and the end of --minutes finish the step, save and exit with code 75:
    run the same command again to resume. Before the first step, Ctrl-C ends the command at once, with code 130. With
    nohup in front, the run continues when the terminal closes.

    [dim]blackmamba train tiny --nproc 2 parallel.expert=2[/dim]

    [dim]blackmamba train my_run.yaml --minutes 30[/dim]

    [dim]srun blackmamba train blackmamba_1.5b data.mixture=mixture.yaml[/dim]

    [dim]MASTER_ADDR=node0 blackmamba train my_run.yaml --nproc 8 --node 1/2[/dim]
    """
    run = compose(configs, quiet=nproc is not None, to_train=True)
    if minutes is not None:
        timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
    if nproc is None:
        from megatron_blackmamba.training.loop import train as train_here

        if node is not None:
            raise typer.BadParameter("needs --nproc, the number of processes on each machine", param_hint="--node")

        raise typer.Exit(train_here(run))
    from megatron_blackmamba.runtime import layout
    from megatron_blackmamba.training.launcher import Node, launch_training

    cores = usable_cores()
    if nproc > MOST_PER_CORE * cores:
        raise layout.LayoutError(
            f"--nproc {nproc} is too many for {cores} cores: use at most {MOST_PER_CORE * cores}, or more machines with"
            " torchrun or srun"
        )
    place = Node() if node is None else Node(*_numbers(node))
    layout.check(run, nproc * place.count)
    if nproc > cores:
        print(f"blackmamba: {nproc} processes share {cores} cores and are no faster than {cores}", file=sys.stderr)
    code = launch_training(run, configs, nproc, restarts if place.count == 1 else 0, node=place)
    if code == INTERRUPTED:
        interrupts.say()
    raise typer.Exit(code)


def _numbers(node: str) -> tuple[int, int]:
    """Return this machine's number and the count of machines from K/M."""
    found = re.fullmatch(r"(\d+)/(\d+)", node)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if number >= count:
        raise typer.BadParameter(
            f"{node}: give this machine's number, from 0, and their count: 0/2", param_hint="--node"
        )
    if count > 1 and not os.environ.get("MASTER_ADDR"):
        raise typer.BadParameter("set MASTER_ADDR to the host of machine 0, on all machines", param_hint="--node")
    return number, count
