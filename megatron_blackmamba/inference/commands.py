"""`blackmamba generate`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_blackmamba.console.progress import working
from megatron_blackmamba.interchange.commands import Averaged, Precision

ModelPath = Annotated[Path, typer.Argument(help="A run, a checkpoint, a Hugging Face export, or the released files.")]
Dtype = Annotated[
    Precision | None,
    typer.Option(help="Precision of the large matrices.", show_default="as stored (fp16 as fp32), or bf16 to fit"),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if available")]
TokenizerFile = Annotated[
    Path | None, typer.Option("--tokenizer", "-t", help="A tokenizer.json, if the model has none.")
]


def generate(
    model: ModelPath,
    continued: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts to continue.")] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", "--start", metavar="TEXT", help="Text to continue; repeat for a batch, - reads stdin."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='File of prompts: JSON Lines with a "prompt" field, or one prompt per line.')
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Number of texts per prompt.")] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of new tokens; generation also stops at end of document.")
    ] = 128,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this string; repeat for several.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature; 0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 means all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Minimum probability, relative to the most likely token.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes earlier tokens less likely.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed; equal seed and prompt give equal texts.")] = 0,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Print text as it is generated; with --json, one line per piece.",
            show_default="for one text without --json",
        ),
    ] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print text when it is complete.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    tokenizer: TokenizerFile = None,
    ema: Averaged = False,
    draft: Annotated[
        bool, typer.Option("--draft", help="Let the extra depth (model.mtp) guess tokens of one text.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate text with a run, a checkpoint or an export.

    [dim]blackmamba generate runs/quickstart --prompt "Once upon a time" --max-new-tokens 60[/dim]

    [dim]blackmamba generate exports/blackmamba_1.5b -p "The proof" -p "The recipe" --temperature 0 --json[/dim]

    [dim]blackmamba generate runs/quickstart --prompts questions.jsonl -n 4 --stop "\\n\\n" --json --stream[/dim]
    """
    from megatron_blackmamba.inference import Sampling, load
    from megatron_blackmamba.interchange.commands import torch_dtype

    sampling = Sampling(temperature, top_p, seed, top_k, min_p, repetition_penalty)
    texts = [
        *(sys.stdin.read() if text == "-" else text for text in [*(continued or []), *(prompt or [])]),
        *_from_file(prompts),
    ]
    if not texts:
        raise typer.BadParameter("give --prompt TEXT or --prompts FILE")
    if stream and no_stream:
        raise typer.BadParameter("--stream and --no-stream exclude each other")
    if stream and not as_json and len(texts) * samples > 1:
        raise typer.BadParameter("--stream prints one text. With several, add --json, or leave it out")
    with working(f"loading {model}"):
        writer = load(model, dtype=torch_dtype(dtype), device=device, tokenizer=tokenizer, ema=ema, draft=draft)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": _unescaped(stop or [])}
    if as_json and stream:
        for piece in writer.pieces(texts, samples=samples, **options):
            line = {"prompt": piece.row // samples, "sample": piece.row % samples, "text": piece.text}
            print(json.dumps(line | {"finished": piece.finished}, ensure_ascii=False), flush=True)
        return
    if len(texts) * samples == 1 and not as_json and not no_stream:
        pieces = writer.stream(texts[0], **options)
        print(texts[0] + next(pieces, ""), end="", flush=True)  # together, so that an error stands alone
        for text in pieces:
            print(text, end="", flush=True)
        print()
        return
    written = writer.generate_batch(texts, samples=samples, **options)
    whole = [(texts[row // samples], text) for row, text in enumerate(written)]
    if as_json:
        print(json.dumps([{"prompt": before, "text": text} for before, text in whole], ensure_ascii=False))
    else:
        print("\n\n".join(before + text for before, text in whole))


def _unescaped(stop: list[str]) -> list[str]:
    """Turn \\n and \\t as a shell passes them on into the characters."""
    return [text.replace("\\n", "\n").replace("\\t", "\t") for text in stop]


def _from_file(path: Path | None) -> Iterator[str]:
    from megatron_blackmamba.inference.sampling import GenerationError

    if path is None:
        return
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):  # splitlines knows more ends
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line.removesuffix("\r")
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise GenerationError(f'{path}: line {number} has no "prompt" with a text')
        yield text
