"""The verb `blackmamba evaluate`, as the command line has it."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_blackmamba.evaluation.options import Options
from megatron_blackmamba.interchange.commands import Json, Precision
from megatron_blackmamba.options import taking


@taking(Options)
def evaluate(
    model: Annotated[Path, typer.Argument(help="A run, a checkpoint, a Hugging Face export, or the released files.")],
    options: Options,
    tasks: Annotated[
        str, typer.Option(help="lm-eval tasks, comma-separated; paper means the paper's eight.")
    ] = "paper",
    dtype: Annotated[
        Precision | None, typer.Option(help="Precision of the large matrices.", show_default="as stored, if it fits")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Score each checkpoint of a run as it appears.")] = False,
    as_json: Json = False,
) -> None:
    """Score a model on the paper's tasks or other lm-eval tasks. Finished tasks are not repeated.

    [dim]blackmamba evaluate runs/tiny --data evaldata --limit 200[/dim]

    [dim]blackmamba evaluate runs/blackmamba_1.5b --data evaldata --encoding separate --watch[/dim]
    """
    from megatron_blackmamba.evaluation.commands import run as evaluate_model
    from megatron_blackmamba.evaluation.tasks import names_of
    from megatron_blackmamba.evaluation.watch import watch as watch_run
    from megatron_blackmamba.interchange.commands import torch_dtype

    if watch and (options.out is not None or as_json):
        raise typer.BadParameter("--watch writes RUN/evaluations/step_N.json for each checkpoint: no --out, no --json")
    options = replace(options, tasks=names_of(tasks), dtype=torch_dtype(dtype))
    if watch:
        watch_run(model, options)
    else:
        evaluate_model(model, options, as_json)
