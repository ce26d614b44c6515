"""The verbs of `blackmamba data` that clean documents: filter, dedup and decontaminate."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from megatron_blackmamba.console.options import taking
from megatron_blackmamba.console.progress import Progress, State
from megatron_blackmamba.data_tools.options import (
    CleaningOptions,
    DecontaminationOptions,
    DedupOptions,
    FilterOptions,
)

if TYPE_CHECKING:
    from megatron_blackmamba.data_tools.cleaning import Cleaning, Stage

Paths = Annotated[
    list[str], typer.Argument(metavar="INPUT... OUT_DIR", help="Files or folders; last, the output folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@taking(FilterOptions)
def filter_(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="YAML list of rules.")],
    paths: Paths,
    options: FilterOptions,
    as_json: Json = False,
) -> None:
    """Remove documents by the rules of a recipe, with counts and examples for every rule.

    [dim]blackmamba data filter recipe.yaml pile/train filtered/pile --sample 10000[/dim]

    [dim]blackmamba data filter recipe.yaml pile/train filtered/pile --at-most 0.3[/dim]
    """
    from megatron_blackmamba.data_tools import cleaning

    cleaning.require_datatrove()
    from megatron_blackmamba.data_tools import filtering, recipes
    from megatron_blackmamba.data_tools.filter_tally import report
    from megatron_blackmamba.data_tools.rejects import InputError
    from megatron_blackmamba.formats import atomic

    if options.at_most is not None and not 0 <= options.at_most <= 1:
        raise InputError(f"--at-most {options.at_most:g}: give a share of the documents between 0 and 1")
    rules = recipes.read_recipe(recipe, options.language)
    names = [rule.name for rule in rules]
    task = _cleaning("filter", paths, {"rules": recipes.described(rules), "by": options.by}, options)
    if options.by:
        filtering.refuse_unknown_field(task, options.by)
    if options.sample:
        tally, path = filtering.sample(task, rules, options.by, options.sample), task.out_dir / "sample.md"
        atomic.write_text(path, report(tally, names))
        _tell_rules(tally.figures(names), path, as_json)
        return
    if options.at_most is not None and not task.done.exists():
        first = filtering.sample(task, rules, options.by, filtering.CHECKED_FIRST)
        filtering.refuse_too_many(first, options.at_most, sampled=True)
    with task.alone():
        task.refuse_other_settings()
        _run(task, filtering.stages(task, rules, options.by, options.at_most), as_json)


def _tell_rules(figures: dict[str, Any], report: Path, as_json: bool) -> None:
    from megatron_blackmamba.data_tools.filter_tally import aligned, tables

    if as_json:
        print(json.dumps({**figures, "report": str(report)}))
        return
    for columns, rows in tables(figures):
        print("\n".join(aligned(columns, rows)))
    print(f"documents to read: {report}")


@taking(DedupOptions)
def dedup(paths: Paths, options: DedupOptions, as_json: Json = False) -> None:
    """Remove near-duplicate documents. The longest copy is kept, and each removed one was compared with it.

    [dim]blackmamba data dedup pile/train clean/pile[/dim]

    [dim]blackmamba data dedup pile/train clean/pile --slurm cpu --workers 64[/dim]
    """
    from megatron_blackmamba.data_tools import cleaning

    cleaning.require_datatrove()
    from megatron_blackmamba.data_tools.dedup_estimate import Estimate
    from megatron_blackmamba.data_tools.deduplication import described, settings, stages

    task = _cleaning("dedup", paths, settings(options), options)
    with task.alone():
        task.refuse_other_settings()
        estimate = Estimate.of(task, options)
        if not task.done.exists():
            warnings = estimate.check(task.out_dir, options.memory if options.slurm else None)
            if not as_json:
                print("\n".join([str(estimate), *warnings]), flush=True)
        _run(task, stages(task, options, estimate), as_json)
        report = task.work / "clusters.json"
        if task.done.exists() and not as_json:
            print("\n".join(described(json.loads(report.read_bytes()))))


@taking(DecontaminationOptions)
def decontaminate(paths: Paths, options: DecontaminationOptions, as_json: Json = False) -> None:
    """Cut passages out of documents that hold items of evaluation tasks, or remove the documents.

    [dim]blackmamba data decontaminate clean/pile final/pile[/dim]

    [dim]blackmamba data decontaminate clean/pile final/pile --against piqa --against my_test.jsonl[/dim]

    [dim]blackmamba data decontaminate /raw /clean --mixture open_mix[/dim]
    """
    from megatron_blackmamba.data_tools import cleaning

    cleaning.require_datatrove()
    from megatron_blackmamba.data_tools import decontamination
    from megatron_blackmamba.data_tools.evaluation_items import contents_of, read_evaluations
    from megatron_blackmamba.data_tools.item_index import ItemIndex
    from megatron_blackmamba.data_tools.splitters import word_splitter
    from megatron_blackmamba.formats.evaluations import PAPER

    names = options.against or PAPER
    decisive = {"against": list(names), "n_grams": options.n_grams, "fields": list(options.item_fields)}
    decisive |= {"drop": options.drop, "margin": options.margin}
    folders = _folders_of(options.mixture, paths) if options.mixture else {"": paths}
    corpora = {name: _cleaning("decontaminate", each, decisive, options) for name, each in folders.items()}
    evaluations = read_evaluations(names, options.task_folder, options.item_fields)
    items = [item for evaluation in evaluations for item in evaluation.items]
    corpora = {name: replace(task, settings=task.settings | contents_of(items)) for name, task in corpora.items()}
    index = ItemIndex(items, options.n_grams, word_splitter(options.language))
    tasks = decontamination.tasks_of(evaluations, index)
    if not as_json:
        print("\n".join(decontamination.announced(tasks)), flush=True)
    found = {}
    with ExitStack() as locks:
        for task in corpora.values():  # what is refused is refused before hours of work
            locks.enter_context(task.alone())
            task.refuse_other_settings()
        for number, (name, task) in enumerate(corpora.items(), 1):
            what = f"{name} ({number} of {len(corpora)})" if name else task.name
            stages = decontamination.stages(task, index, tasks, drop=options.drop, margin=options.margin)
            found[name] = _run(task, stages, as_json, what=what, alone=not options.mixture)
    if not options.mixture:
        return
    if as_json:
        print(json.dumps({"corpora": found}))
    elif rows := [decontamination.summary(name, counts) for name, counts in found.items() if counts]:
        print("\n".join(decontamination.table(rows)))


def _folders_of(mixture: str, paths: Sequence[str]) -> dict[str, list[str]]:
    """Return input and output folder of each source of a mixture."""
    from megatron_blackmamba.data_tools.mixture import find_mixture
    from megatron_blackmamba.data_tools.rejects import InputError
    from megatron_blackmamba.formats.mixture import Mixture

    if len(paths) != 2:
        raise InputError("--mixture: name one folder with a folder for each source, and the output folder")
    folders = {
        source.name: [str(Path(path) / source.name) for path in paths]
        for source in Mixture.read(find_mixture(mixture)).sources
    }
    if missing := [folder for folder, _ in folders.values() if not Path(folder).is_dir()]:
        raise InputError(f"--mixture {mixture}: no folder {', '.join(missing)}. Give each source of the mixture one")
    return folders


def _cleaning(name: str, paths: Sequence[str], settings: dict[str, Any], options: CleaningOptions) -> "Cleaning":
    from megatron_blackmamba.data_tools.batches import ReadOptions
    from megatron_blackmamba.data_tools.cleaning import Cleaning
    from megatron_blackmamba.data_tools.rejects import InputError, Tolerance
    from megatron_blackmamba.data_tools.sources import find_sources, parse_size, plan_shards
    from megatron_blackmamba.data_tools.splitters import words_of
    from megatron_blackmamba.data_tools.streams import known_encoding

    if len(paths) < 2:
        raise InputError(f"{paths[0]}: name at least one input and, last, the output folder")
    *inputs, out_dir = paths
    if "://" in out_dir:
        raise InputError(f"{out_dir}: this writes to a local folder only. Copy it to object storage afterwards")
    if "-" in inputs:
        raise InputError("standard input (-) can be read only once, but this reads it twice. Give files")
    words_of(options.language)
    found = find_sources(inputs, cast("Any", options.format), options.match, apart=out_dir, exclude=options.exclude)
    fields, encoding = options.fields or ("text",), known_encoding(options.encoding)
    return Cleaning(
        name,
        plan_shards(found.sources, parse_size(options.part_size)),
        Path(out_dir).absolute(),
        ReadOptions(fields, encoding=encoding),
        Tolerance.parse(options.max_bad),
        options,
        {**settings, "language": options.language, "field": list(fields), "max_bad": options.max_bad}
        | ({"encoding": encoding} if encoding else {}),
    )


def _run(
    task: "Cleaning", stages: "Sequence[Stage]", as_json: bool, *, what: str = "", alone: bool = True
) -> dict[str, Any] | None:
    """Run the stages, print the result, and return it unless they are Slurm jobs now. alone: not one of several."""
    from megatron_blackmamba.data_tools.origins import CleaningManifest, refuse_incomplete
    from megatron_blackmamba.data_tools.parts import REMOVED, part_name
    from megatron_blackmamba.data_tools.rejects import InputError

    total = sum(stage.tasks for stage in stages)

    def state() -> State:
        done = sum(len(stage.finished()) for stage in stages)
        return State(task.share(stages), f"{done} of {total} tasks of {what or task.name}")

    try:
        with Progress(state, quiet=task.options.slurm is not None):
            stages[-1].executor.run()
    except OSError as error:  # no space, no permission
        where, why = error.filename or task.out_dir, error.strerror or error
        raise InputError(f"{where}: {why}. Once that is put right, run the same command again") from error
    if task.options.slurm is not None and not task.done.exists():
        print(f"{task.out_dir}: submitted {len(stages)} Slurm jobs; the last one is {stages[-1].executor.job_id}")
        return None
    manifest = CleaningManifest.read(task.out_dir)  # older versions wrote none
    parts = [part.name for part in manifest.parts] if manifest else [*map(part_name, range(len(task.parts)))]
    for path in (task.out_dir / name for name in (REMOVED, *parts)):
        if not path.exists():
            raise InputError(f"{path}: is missing, though this finished. Restore it, or choose another folder")
    refuse_incomplete(task.out_dir)
    counts = json.loads(task.done.read_bytes())
    result = {**counts, "out_dir": str(task.out_dir), "removed_list": str(task.out_dir / REMOVED)}
    if as_json and alone:
        print(json.dumps(result))
    if not as_json:
        skipped = f", skipped {counts['skipped']:,} records without a text" if counts.get("skipped") else ""
        cut = f", cut {counts['cut']:,} passages" if counts.get("cut") else ""
        print(
            f"{task.out_dir}: kept {counts['kept']:,} documents, removed {counts['removed']:,}{cut}{skipped} "
            f"({REMOVED} lists them)",
            flush=True,
        )
        if counts.get("rules"):
            from megatron_blackmamba.data_tools.filter_tally import REPORT as FILTERS

            _tell_rules(counts, task.out_dir / FILTERS, as_json)
        if counts.get("tasks") and alone:
            from megatron_blackmamba.data_tools.decontamination import REPORT, table

            print("\n".join([*table(counts["tasks"]), f"passages to read: {task.out_dir / REPORT}"]))
    return result
