"""The verb `blackmamba evaluate`, as the command line has it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.formats.evaluations import Encoding
from megatron_blackmamba.interchange.commands import Json, Precision
from megatron_blackmamba.options import taking


@dataclass(frozen=True)
class Options:
    """The options of scoring."""

    tasks: Sequence[str] = ()
    dtype: Any = None
    """A torch.dtype."""
    data: Annotated[Path | None, typer.Option(help="Folder with TASK.jsonl, TASK.jsonl.gz or TASK.parquet.")] = None
    download: Annotated[bool, typer.Option("--download", help="Let lm-eval download missing data.")] = False
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of questions per task.", show_default="all")
    ] = None
    encoding: Annotated[
        Encoding, typer.Option(help="Tokenize context and continuation together, or separately as in the paper.")
    ] = Encoding.joint
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if available")] = None
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Number of scoring processes.", show_default="one per GPU, 1 on CPU")
    ] = None
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a batch.", show_default="2048, 16384 on a GPU")
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", "-t", help="A tokenizer.json, if the model has none.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Output file.", show_default="RUN/evaluations/step_N.json")] = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "encoding", Encoding(self.encoding))
        except ValueError:
            known = " or ".join(each.value for each in Encoding)
            raise EvaluationError(f"encoding must be {known}, not {self.encoding!r}") from None


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
