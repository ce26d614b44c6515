"""The verbs `blackmamba data dedup` and `decontaminate`, as the command line has them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_blackmamba.progress import Progress, State

if TYPE_CHECKING:
    from megatron_blackmamba.data_tools.cleaning import Cleaning, Slurm

FROM = "Input"
WHERE = "Where it runs"
Paths = Annotated[
    list[str], typer.Argument(metavar="INPUT... OUT_DIR", help="Files or folders; last, the output folder.")
]
Format = Annotated[
    str | None, typer.Option(help="jsonl, parquet, arrow or text. Default: by file name.", rich_help_panel=FROM)
]
Field = Annotated[
    list[str] | None, typer.Option(help="Field with the text \\[text]; repeat to join.", rich_help_panel=FROM)
]
Match = Annotated[
    str | None, typer.Option(help="Files to read in folders, such as '*.md|*.rst'.", rich_help_panel=FROM)
]
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Files to skip in folders.", rich_help_panel=FROM)
]
MaxBad = Annotated[
    str,
    typer.Option(metavar="N|FRACTION", help="Bad records allowed per part; they are skipped.", rich_help_panel=FROM),
]
PartSize = Annotated[str, typer.Option(help="Input size of one part, read by one task.", rich_help_panel=WHERE)]
Workers = Annotated[
    int, typer.Option(min=0, help="Number of parallel tasks; 0 means one per core.", rich_help_panel=WHERE)
]
Partition = Annotated[
    str | None, typer.Option("--slurm", metavar="PARTITION", help="Run as Slurm arrays.", rich_help_panel=WHERE)
]
Time = Annotated[str, typer.Option(help="Time limit of a Slurm task.", rich_help_panel=WHERE)]
Memory = Annotated[int, typer.Option(metavar="GB", help="Memory of a Slurm task.", rich_help_panel=WHERE)]
Language = Annotated[
    str | None,
    typer.Option(help="Language of datatrove's word splitter. Default: split at spaces.", rich_help_panel=FROM),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def dedup(
    paths: Paths,
    n_grams: Annotated[int, typer.Option(help="Words per n-gram.")] = 2,
    buckets: Annotated[int, typer.Option(help="Number of MinHash groups; more find less similar duplicates.")] = 60,
    hashes: Annotated[int, typer.Option(help="MinHashes per group; more are stricter.")] = 7,
    format: Format = None,
    field: Field = None,
    match: Match = None,
    exclude: Exclude = None,
    language: Language = None,
    max_bad: MaxBad = "0",
    part_size: PartSize = "256MB",
    workers: Workers = 0,
    slurm: Partition = None,
    time: Time = "12:00:00",
    memory: Memory = 4,
    as_json: Json = False,
) -> None:
    """Remove near-duplicate documents with datatrove's MinHash; one document of each cluster is kept.

    [dim]blackmamba data dedup pile/train clean/pile[/dim]

    [dim]blackmamba data dedup pile/train clean/pile --slurm cpu --workers 64[/dim]
    """
    from megatron_blackmamba.data_tools import cleaning

    cleaning.require_datatrove()
    from megatron_blackmamba.data_tools.deduplication import Similarity, stages

    settings = {"n_grams": n_grams, "buckets": buckets, "hashes": hashes, "language": language}
    task = _cleaning(
        "dedup",
        paths,
        settings,
        format,
        field,
        match,
        exclude,
        max_bad,
        part_size,
        workers,
        _slurm(slurm, time, memory),
    )
    with task.alone():
        task.refuse_other_settings()
        _run(task, stages(task, Similarity(n_grams, buckets, hashes), language), as_json)


def decontaminate(
    paths: Paths,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK|FILE", help="lm-eval task or JSON lines; repeat for more \\[the paper's eight]."),
    ] = None,
    task_folder: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder with lm-eval task definitions of your own.")
    ] = None,
    n_grams: Annotated[int, typer.Option(help="Number of consecutive words that make a match.")] = 12,
    format: Format = None,
    field: Field = None,
    match: Match = None,
    exclude: Exclude = None,
    language: Language = None,
    max_bad: MaxBad = "0",
    part_size: PartSize = "256MB",
    workers: Workers = 0,
    slurm: Partition = None,
    time: Time = "12:00:00",
    memory: Memory = 4,
    as_json: Json = False,
) -> None:
    """Remove documents that contain items of evaluation tasks, with datatrove's n-gram filter.

    [dim]blackmamba data decontaminate clean/pile final/pile[/dim]

    [dim]blackmamba data decontaminate clean/pile final/pile --against piqa --against my_test.jsonl[/dim]
    """
    from megatron_blackmamba.data_tools import cleaning

    cleaning.require_datatrove()
    from megatron_blackmamba.data_tools.decontamination import ItemIndex, stages
    from megatron_blackmamba.data_tools.evaluation_items import PAPER_TASKS, contents_of, read_items

    names = tuple(against or PAPER_TASKS)
    settings = {"against": list(names), "n_grams": n_grams, "language": language}
    task = _cleaning(
        "decontaminate",
        paths,
        settings,
        format,
        field,
        match,
        exclude,
        max_bad,
        part_size,
        workers,
        _slurm(slurm, time, memory),
    )
    items = read_items(names, task_folder)
    task = replace(task, settings={**task.settings, **contents_of(items)})
    with task.alone():
        task.refuse_other_settings()
        index = ItemIndex(items, n_grams, language)
        if not as_json:
            short = f", of which {index.too_short} are too short to look for" if index.too_short else ""
            print(f"looking for {index.items} evaluation items{short}")
        _run(task, stages(task, index), as_json)


def _slurm(partition: str | None, time: str, memory: int) -> "Slurm | None":
    from megatron_blackmamba.data_tools.cleaning import Slurm

    return None if partition is None else Slurm(partition, time, memory)


def _cleaning(
    name: str,
    paths: Sequence[str],
    settings: dict[str, Any],
    format: Any,
    field: Sequence[str] | None,
    match: str | None,
    exclude: Sequence[str] | None,
    max_bad: str,
    part_size: str,
    workers: int,
    slurm: "Slurm | None",
) -> "Cleaning":
    from megatron_blackmamba.data_tools.batches import ReadOptions
    from megatron_blackmamba.data_tools.cleaning import Cleaning
    from megatron_blackmamba.data_tools.rejects import InputError, Tolerance
    from megatron_blackmamba.data_tools.sources import find_sources, parse_size, plan_shards
    from megatron_blackmamba.data_tools.tokenization import usable_cores

    if len(paths) < 2:
        raise InputError(f"{paths[0]}: name at least one input and, last, the output folder")
    *inputs, out_dir = paths
    if "://" in out_dir:
        raise InputError(f"{out_dir}: this writes to a local folder only. Copy it to object storage afterwards")
    if "-" in inputs:
        raise InputError("standard input (-) can be read only once, but this reads it twice. Give files")
    found = find_sources(inputs, format, match, apart=out_dir, exclude=exclude or ())
    return Cleaning(
        name,
        plan_shards(found.sources, parse_size(part_size)),
        Path(out_dir).absolute(),
        ReadOptions(fields=tuple(field or ("text",))),
        Tolerance.parse(max_bad),
        workers or (-1 if slurm else usable_cores()),
        {**settings, "field": list(field or ("text",)), "max_bad": max_bad},
        slurm,
    )


def _run(task: "Cleaning", stages: Sequence[Any], as_json: bool) -> None:
    from megatron_blackmamba.data_tools.cleaning import REMOVED, part_name
    from megatron_blackmamba.data_tools.origins import CleaningManifest, refuse_incomplete
    from megatron_blackmamba.data_tools.rejects import InputError

    total = sum(stage.tasks for stage in stages)

    def state() -> State:
        done = sum(1 for _ in task.work.glob("*/completions/*"))
        return State(done / total, f"{done} of {total} tasks of {task.name}")

    try:
        with Progress(state, quiet=task.slurm is not None):
            stages[-1].run()
    except OSError as error:  # no space, no permission
        where, why = error.filename or task.out_dir, error.strerror or error
        raise InputError(f"{where}: {why}. Once that is put right, run the same command again") from error
    if task.slurm is not None and not task.done.exists():
        print(f"{task.out_dir}: submitted {len(stages)} Slurm jobs; the last one is {stages[-1].job_id}")
        return
    manifest = CleaningManifest.read(task.out_dir)  # older versions wrote none
    parts = [part.name for part in manifest.parts] if manifest else [*map(part_name, range(len(task.parts)))]
    for path in (task.out_dir / name for name in (REMOVED, *parts)):
        if not path.exists():
            raise InputError(f"{path}: is missing, though this finished. Restore it, or choose another folder")
    refuse_incomplete(task.out_dir)
    counts = json.loads(task.done.read_bytes())
    if as_json:
        print(json.dumps({**counts, "out_dir": str(task.out_dir), "removed_list": str(task.out_dir / REMOVED)}))
    else:
        skipped = f", skipped {counts['skipped']:,} records without a text" if counts.get("skipped") else ""
        print(
            f"{task.out_dir}: kept {counts['kept']:,} documents, removed {counts['removed']:,}{skipped} "
            f"({REMOVED} lists them)"
        )
