"""The verb `blackmamba evaluate`, as the command line has it."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megatron_blackmamba.console.options import taking
from megatron_blackmamba.evaluation.options import Options
from megatron_blackmamba.inference.commands import Device
from megatron_blackmamba.interchange.commands import Json, Out, Precision, Target, TokenizerFile


@taking(Options)
def evaluate(
    options: Options,
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A run, a checkpoint, a Hugging Face export, or the released files. None: only download into --data.",
            show_default=False,
        ),
    ] = None,
    files: Annotated[list[str] | None, typer.Argument(help="More files for --text.", show_default=False)] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="lm-eval tasks, comma-separated; paper means the paper's eight.",
            show_default="paper; none with --text",
        ),
    ] = None,
    dtype: Annotated[
        Precision | None,
        typer.Option(
            help="Precision of the large matrices.",
            show_default="as stored (fp16 as fp32), or bf16 to fit",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Score each checkpoint of a run as it appears.")] = False,
    as_json: Json = False,
) -> None:
    """Score a model on the paper's tasks, other lm-eval tasks or your own text. Finished tasks are not repeated.

    [dim]blackmamba evaluate runs/tiny --data evaldata --limit 200[/dim]

    [dim]blackmamba evaluate runs/tiny --text book.txt pages.jsonl.gz[/dim]

    [dim]blackmamba evaluate runs/blackmamba_1.5b --data evaldata --encoding separate --watch[/dim]

    [dim]blackmamba evaluate --data evaldata --download[/dim]
    """
    from megatron_blackmamba.evaluation.commands import fill
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
    if model is None:
        if not (options.download and options.data) or options.text or watch:
            raise typer.BadParameter("name a model; without one, `--data DIR --download` fills DIR")
        fill(named, options.data)
        return
    options = replace(options, tasks=named, text=(*options.text, *(files or ())), dtype=torch_dtype(dtype))
    if watch:
        watch_run(model, options)
    else:
        evaluate_model(model, options, as_json)


def keep_bias(
    model: Annotated[Path, typer.Argument(help="A run, a checkpoint, a Hugging Face export, or the released files.")],
    out: Out,
    text: Annotated[list[Path], typer.Option(help="Text to find the bias with, and to measure; repeat for several.")],
    to: Annotated[Target, typer.Option(help="A checkpoint, or a Hugging Face folder.")] = Target.checkpoint,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the text to read.")] = 1_000_000,
    tokenizer: TokenizerFile = None,
    device: Device = None,
) -> None:
    """Find the bias of Sinkhorn's plan from text, keep it for inference, and print what it gains.

    Half of the text finds the bias, the other half measures. The new model has model.router.kind=sinkhorn_bias.

    [dim]blackmamba keep-bias BlackMamba-1.5B checkpoints/kept --text pile.jsonl --tokenizer 20B_tokenizer.json[/dim]

    [dim]blackmamba keep-bias runs/tiny exports/kept --to hf --text book.txt[/dim]
    """
    from megatron_blackmamba.console.progress import working
    from megatron_blackmamba.evaluation.keep_bias import kept
    from megatron_blackmamba.interchange import convert
    from megatron_blackmamba.interchange.open import open_model

    with working("finding the bias"):
        found, gain = kept(open_model(model, tokenizer), text, tokens, device)
    print(gain)
    with working(f"writing {out}"):
        done = convert.to_hf(found, out) if to is Target.hf else convert.to_checkpoint(found, out)
    print(f"{out}: compared with the source: {done}")
