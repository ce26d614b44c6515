"""The options of scoring, for the command line and for Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.formats.evaluations import Encoding
from megatron_blackmamba.interchange.commands import Averaged


@dataclass(frozen=True)
class Options:
    """The options of scoring."""

    tasks: Sequence[str] = ()
    dtype: Any = None
    """A torch.dtype."""
    text: Annotated[
        tuple[str, ...],
        typer.Option(metavar="FILE", help="Also score text: bits per byte of its documents; repeatable."),
    ] = ()
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of context that --text shows a token.", show_default="as in training"),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(min=128, help="Longest position of --tasks length.", show_default="4 times that of training"),
    ] = None
    data: Annotated[Path | None, typer.Option(help="Folder with TASK.jsonl, TASK.jsonl.gz or TASK.parquet.")] = None
    download: Annotated[
        bool, typer.Option("--download", help="Let lm-eval download missing data, into --data if given.")
    ] = False
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of questions per task, or documents per text.", show_default="all"),
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
    ema: Averaged = False
    out: Annotated[Path | None, typer.Option(help="Output file.", show_default="RUN/evaluations/step_N.json")] = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "encoding", Encoding(self.encoding))
        except ValueError:
            known = " or ".join(each.value for each in Encoding)
            raise EvaluationError(f"encoding must be {known}, not {self.encoding!r}") from None
