"""The verb `blackmamba data trace`, as the command line has it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_blackmamba.data_tools.progress import counted

if TYPE_CHECKING:
    from megatron_blackmamba.trace.documents import Piece, Tracer
    from megatron_blackmamba.trace.ranks import Share


def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    step: Annotated[int | None, typer.Option(min=1, help="Show the batch of this step.")] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Show only sample K, counted from 0, of the batch or the rank's share."),
    ] = None,
    samples: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="Show these samples, numbered as in the run's events.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Show only what this rank reads of the batch.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="tp2,cp2,...", help="Layout of --rank: tp, pp, cp, ep, etp.", show_default="the run's"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes of --rank.", show_default="the run's")
    ] = None,
    document: Annotated[
        str | None, typer.Option(metavar="FILE:RECORD", help="Show the steps that read this raw record.")
    ] = None,
    chars: Annotated[int, typer.Option(min=0, help="Characters shown per document; 0 means all.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the documents in a batch of a run, or the steps that read a document.

    [dim]blackmamba data trace runs/tiny --step 120 --sample 0[/dim]

    [dim]blackmamba data trace runs/tiny --step 120 --rank 5 --layout tp2,ep2,cp2 --processes 8[/dim]

    [dim]blackmamba data trace runs/tiny --document pile/00.jsonl.zst:48211[/dim]
    """
    from megatron_blackmamba.trace.documents import Tracer
    from megatron_blackmamba.trace.steps import TraceError

    if sum(given is not None for given in (step, samples, document)) != 1:
        raise TraceError("name one of --step N, --samples FIRST-LAST and --document FILE:RECORD")
    if sample is not None and step is None:
        raise TraceError("--sample K is a sample of a batch: name its step with --step N")
    if rank is None and (layout or processes):
        raise TraceError("--layout and --processes say what a rank is: name it with --rank N")
    if rank is not None and step is None:
        raise TraceError("--rank N reads a part of a batch: name its step with --step N")
    tracer = Tracer(run)
    if document is not None:
        _show_readings(tracer, document, as_json)
        return
    numbers = _range(samples) if samples is not None else tracer.steps.samples_of(step or 0)
    tracer.steps.refuse_unread(numbers)
    share = None
    if rank is not None:
        from megatron_blackmamba.trace import ranks

        job = ranks.job_at(run, tracer.config, step or 0)
        parallel = job.parallel if layout is None else ranks.parse_layout(layout)
        if (processes := processes or job.processes) is None:
            raise TraceError(f"{run}: its events do not say how many processes it had. Add --processes N")
        share = ranks.share_of(tracer.config, numbers, rank, parallel, processes, job.micro_batch)
        numbers = [number for number, _ in share.numbered()]
    if sample is not None:
        if sample >= len(numbers):
            whose = "batch" if rank is None else "rank's share of the batch"
            raise TraceError(f"--sample {sample}: the {whose} has {len(numbers)} samples, counted from 0")
        numbers = numbers[sample : sample + 1]
    _show_samples(tracer, numbers, {"step": step, "rank": rank}, share, chars, as_json)


def _range(text: str) -> Sequence[int]:
    from megatron_blackmamba.trace.steps import TraceError

    found = re.fullmatch(r"(\d+)(?:[-–](\d+))?", text)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise TraceError(f"--samples {text}: give a first and a last sample, as 1024-1039")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def _show_samples(
    tracer: "Tracer",
    numbers: Sequence[int],
    asked: dict[str, int | None],
    share: "Share | None",
    chars: int,
    as_json: bool,
) -> None:
    shown: list[dict[str, Any]] = []
    micro_batches = dict(share.numbered()) if share else {}
    for number in numbers:
        pieces = list(share.clipped(tracer.pieces(number)) if share else tracer.pieces(number))
        of_rank = (
            {"place": share.place, "micro_batch": micro_batches[number], "part": [share.here.start, share.here.stop]}
            if share
            else {}
        )
        if as_json:
            described = [_described(piece, tracer.text(piece), chars) for piece in pieces]
            shown.append({"sample": number, "source": pieces[0].source, **of_rank, "documents": described})
            continue
        when = "".join(f"{name} {value}, " for name, value in asked.items() if value is not None)
        if share:
            when += "".join(f"{group} {part}, " for group, part in share.place.items())
            when += f"micro-batch {micro_batches[number]}, tokens {share.here.start} to {share.here.stop - 1} of "
        print(f"=== {when}sample {number}: {pieces[0].source}, {counted(len(pieces), 'document')}")
        for piece in pieces:
            print(f"--- {piece.origin}: {_extent(piece)}")
            print(_cut(tracer.text(piece), chars))
    if as_json:
        told = {name: value for name, value in asked.items() if name != "rank" or value is not None}
        print(json.dumps({"run": str(tracer.run), **told, "samples": shown}))


def _show_readings(tracer: "Tracer", document: str, as_json: bool) -> None:
    from megatron_blackmamba.trace.steps import TraceError

    file, _, record = document.rpartition(":")
    if not file or not record.isdecimal():
        raise TraceError(f"--document {document}: give a raw file and a record, as pile/00.jsonl.zst:48211")
    readings = tracer.readings(file, int(record))
    if as_json:
        print(json.dumps({"run": str(tracer.run), "document": document, "readings": [vars(each) for each in readings]}))
        return
    for each in readings:
        last = each.first_token + each.tokens - 1
        extent = f"tokens {each.first_token} to {last} of {each.document_tokens}"
        trunk = f"{each.run}, " if each.run else ""
        print(f"{trunk}step {each.step}, sample {each.sample}, epoch {each.epoch}: {extent}")
    if not readings:
        print(f"{document}: not read in the {tracer.steps.end} samples so far")


def _extent(piece: "Piece") -> str:
    length = len(piece.ids)
    if length == piece.document_tokens:
        return f"all {length} tokens"
    return f"tokens {piece.first_token} to {piece.first_token + length - 1} of {piece.document_tokens}"


def _described(piece: "Piece", text: str, chars: int) -> dict[str, Any]:
    return {
        "shard": str(piece.shard.prefix),
        "document": piece.document,
        "file": piece.origin.source,
        "record": piece.origin.record,
        "position": piece.position,
        "first_token": piece.first_token,
        "tokens": len(piece.ids),
        "document_tokens": piece.document_tokens,
        "ids": piece.ids.tolist(),
        "text": _cut(text, chars),
    }


def _cut(text: str, chars: int) -> str:
    return text if not chars or len(text) <= chars else text[:chars] + " [...]"
