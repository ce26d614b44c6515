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
    files: Annotated[list[str] | None, typer.Argument(help="More files for --text.", show_default=False)] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="lm-eval tasks, comma-separated; paper means the paper's eight.",
            show_default="paper; none with --text",
        ),
    ] = None,
    dtype: Annotated[
        Precision | None, typer.Option(help="Precision of the large matrices.", show_default="as stored, if it fits")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Score each checkpoint of a run as it appears.")] = False,
    as_json: Json = False,
) -> None:
    """Score a model on the paper's tasks, other lm-eval tasks or your own text. Finished tasks are not repeated.

    [dim]blackmamba evaluate runs/tiny --data evaldata --limit 200[/dim]

    [dim]blackmamba evaluate runs/tiny --text book.txt pages.jsonl.gz[/dim]

    [dim]blackmamba evaluate runs/blackmamba_1.5b --data evaldata --encoding separate --watch[/dim]
    """
    from megatron_blackmamba.evaluation.commands import run as evaluate_model
    from megatron_blackmamba.evaluation.tasks import names_of
    from megatron_blackmamba.evaluation.watch import watch as watch_run
    from megatron_blackmamba.interchange.commands import torch_dtype

    if watch and (options.out is not None or as_json):
        raise typer.BadParameter("--watch writes RUN/evaluations/step_N.json for each checkpoint: no --out, no --json")
    if files and not options.text:
        raise typer.BadParameter(
            f"{files[0]}: a second model, or a text? Compare models with two commands; name text with --text"
        )
    named = names_of(tasks or "paper") if tasks or not options.text else ()
    options = replace(options, tasks=named, text=(*options.text, *(files or ())), dtype=torch_dtype(dtype))
    if watch:
        watch_run(model, options)
    else:
        evaluate_model(model, options, as_json)
