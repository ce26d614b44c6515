"""The verb `blackmamba anneal`: a branch of a run whose whole length is the decay of the learning rate."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_blackmamba.config import ConfigError, read_saved
from megatron_blackmamba.formats import branches
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.training.verb import train


def anneal(
    run: Annotated[Path, typer.Argument(help="Folder of the run to branch from.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="More keys to change.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of the decay, such as 20e9 or 20B.")] = ...,  # type: ignore[assignment]
    mixture: Annotated[Path | None, typer.Option(help="Mixture to decay on.", show_default="the run's")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Checkpoint to branch from.", show_default="newest")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the branch.", show_default="RUN_anneal_TOKENS")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Number of processes on this machine.", show_default="1")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only.")] = False,
) -> None:
    """Branch from a run, and let the learning rate decay to its minimum over the given tokens.

    The branch goes on with weights, optimizer state and place in the data. The equivalent `blackmamba train` command is
    printed first. The same `anneal` command resumes the branch.

    [dim]blackmamba anneal runs/trunk --tokens 20e9 --mixture better.yaml --nproc 2[/dim]

    [dim]blackmamba anneal runs/trunk --step 10000 --tokens 5B optimizer.decay_shape=sqrt --dry-run[/dim]
    """
    arguments = arguments_of(run, tokens, changes or [], mixture, step, name)
    options = ["--nproc", str(nproc)] if nproc else []
    print(shlex.join(["blackmamba", "train", *arguments, *options]), file=sys.stdout if dry_run else sys.stderr)
    if dry_run:
        print(shlex.join(["blackmamba", "launch", *arguments, "--nodes", "1"]))
        return
    train(arguments, nproc=nproc)


def arguments_of(
    run: Path,
    tokens: str,
    changes: list[str],
    mixture: Path | None = None,
    step: int | None = None,
    name: str | None = None,
) -> list[str]:
    """Return the arguments of `blackmamba train` for the branch. A branch that has begun stays at its checkpoint."""
    from megatron_blackmamba.checkpoint.reading import read_state, saved_config
    from megatron_blackmamba.data_tools.mixture import parse_count
    from megatron_blackmamba.training.branch import checkpoint_at
    from megatron_blackmamba.training.step.progress import Progress

    trunk, length = RunFolder(run), parse_count(tokens)
    if not trunk.config.is_file():
        raise ConfigError(f"{run}: not a run: it has no {trunk.config.name}. Name a folder such as runs/tiny")
    name = name or f"{run.resolve().name}_anneal_{tokens}"
    branch = RunFolder(run.parent / name)
    checkpoint, at = checkpoint_at(_begun_at(branch, trunk, step) or f"{run}{'' if step is None else f'@{step}'}")
    state = read_state(checkpoint, ("config", "progress"))
    config, progress = saved_config(checkpoint, state), Progress.restored(state["progress"])
    consumed = progress.consumed_samples * config.data.sequence_length
    found = [
        str(trunk.config),
        f"name={name}",
        f"folder={run.parent}",
        f"start.branch={run}@{at}",
        f"training.tokens={consumed + length}",
        "optimizer.decay=wsd",
        f"optimizer.decay_tokens={length}",
    ]
    rate = config.learning_rate_at(progress.consumed_samples)  # the decay begins where the trunk is
    rate = max(float(f"{rate:.6g}"), config.optimizer.min_learning_rate)
    if progress.consumed_samples >= config.warmup_samples and rate != config.optimizer.learning_rate:
        if not rate and not any(change.startswith("optimizer.learning_rate=") for change in changes):
            raise ConfigError(
                f"{run}: its learning rate is 0 at step {at}, so there is nothing to decay. Branch from an earlier"
                " checkpoint (--step N), or name a rate to begin with: optimizer.learning_rate=RATE"
            )
        found.append(f"optimizer.learning_rate={rate!r}")
    if mixture is not None:
        found.append(f"data.mixture={mixture}")
    written = read_saved(trunk.config)
    found += ["training.stop_after_steps=null"] if written.training.stop_after_steps else []
    found += ["start.from=null"] if written.start.from_ else []
    return [*found, *changes]


def _begun_at(branch: RunFolder, trunk: RunFolder, step: int | None) -> str | None:
    """Return the RUN@STEP at which the branch has begun, unless that is another one than asked for."""
    if not branch.config.is_file():
        return None
    begun = read_saved(branch.config).start.branch
    if begun is None or Path(branches.split(begun)[0]).resolve() != trunk.root.resolve():
        raise ConfigError(f"{branch.root}: another run has this name. Choose one with --name NAME")
    return begun if step in (None, branches.split(begun)[1]) else None
