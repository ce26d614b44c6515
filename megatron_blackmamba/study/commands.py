"""`blackmamba study`: from a study file to its page, in as many calls as it takes."""

import importlib
import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.console.progress import working
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.report.pictures import write_pictures
from megatron_blackmamba.study import afford, generation, length, page
from megatron_blackmamba.study.config import StudyConfig, StudyError, changed, read_study
from megatron_blackmamba.study.execute import Local, submit_jobs
from megatron_blackmamba.study.grids import best_rates
from megatron_blackmamba.study.options import HowToRun
from megatron_blackmamba.study.points import Evidence
from megatron_blackmamba.study.runs import Cell, Study
from megatron_blackmamba.study.table import Table
from megatron_blackmamba.training.keep.lock import Lock

ANALYSIS = "studies.trend"
"""The analysis of studies on trunks and branches, in the repository alone."""
LOCK = "lock"
"""In the folder: two commands would gather one corpus and train the same runs."""


def open_study(name: str, folder: Path | None) -> Study:
    """Return a study; a folder that another study file began is refused."""
    config = read_study(name)
    study = Study(Path(name).stem, config, (folder or Path("studies") / Path(name).stem).resolve())
    record = study.folder / "study.json"
    if record.is_file() and (place := _changed(StudyConfig.model_validate_json(record.read_bytes()), config)):
        raise StudyError(
            f"{study.folder} belongs to another version of this study: {place} differs. Restore it, or name a new"
            " --folder"
        )
    atomic.write_text(record, config.model_dump_json(indent=2) + "\n")
    return study


def _changed(before: StudyConfig, now: StudyConfig) -> str | None:
    """Return what may not change in a folder and did; a study with branches may grow."""
    if before.has_branches and now.has_branches:
        return changed(before.deciding, now.deciding)
    one, other = (config.model_copy(update={"length": None}) for config in (before, now))
    return None if one == other else "the study file"


def run(study: Study, how: HowToRun) -> bool:
    """Complete the unfinished part of a study and write its page; return whether the study is finished."""
    if how.points is not None and not how.page_only and not study.config.has_branches:
        raise StudyError("--points is for studies on trunks and branches. Leave it out, or add --page")
    known = Evidence.read(how.points, study) if how.points else None
    if known is not None and how.page_only:
        if known.name != study.name:
            raise StudyError(f"{how.points} has points of the study {known.name}: blackmamba study {known.name}")
        draw(known, study, how)
        return True
    if how.slurm and study.config.has_branches:
        raise StudyError("--slurm: branches wait for their trunk, so such a study runs on this machine. Leave it out")
    if how.budget is not None and not study.config.has_branches:
        raise StudyError("--budget is for studies on trunks and branches. Leave it out: --minutes stops any study")
    with ExitStack() as held:
        if not how.page_only:  # which may look on
            held.callback(Lock(study.folder / LOCK).release)
        return _complete(study, how, known)


def _complete(study: Study, how: HowToRun, known: Evidence | None) -> bool:
    finished, measures = False, how.page_only
    if not how.page_only:
        if not study.corpus.mixture.is_file():  # looking at every run of a large study takes seconds
            refuse_large_vocabulary(study)
        fetching = "fetching packages, " if study.config.corpus.packages else ""
        with working(f"{fetching}gathering and tokenizing text"):
            study.corpus.build()
        say(f"corpus: {study.corpus.folder}")
    if known is not None and (wrong := known.unlike(study)):
        raise StudyError(f"{how.points} {wrong}. Leave out --points")
    seconds = None if how.minutes is None else 60 * how.minutes
    local = Local(study.folder / "configs", how.jobs or usable_cores(), seconds, say)
    try:
        finished = _train(settled(study, known), how, known, local)
        measures = not local.stopping
    finally:
        write_page(settled(study, known), how, known, measures)
    return finished


def refuse_large_vocabulary(study: Study) -> None:
    """Refuse a corpus whose tokens a model of the study does not have, before it is gathered."""
    for cell in study.cells():
        if (size := cell.config.model.vocab_size) < (tokens := study.config.corpus.vocabulary):
            which = f"the vocabulary of the corpus is {tokens}, and model.vocab_size of {cell.group} {size}"
            raise StudyError(f"{study.name}: {which}. Set corpus: {{vocabulary: {size}}}, or model.vocab_size")


def _train(study: Study, how: HowToRun, known: Evidence | None, local: Local) -> bool:
    tuning = study.tuning()
    if not _do(tuning, study, how, local):
        return False
    rates = study.learning_rates()
    if rates is None:
        return False
    while True:
        cells = study.runs(rates)
        left = [cell for cell in cells if not (known and known.has(cell))]
        todo = [cell for cell in left if not cell.done]
        ready = [*itertools.takewhile(lambda cell: not cell.waits, todo)] or [c for c in todo if not c.waits]
        if how.budget is not None and study.config.has_branches and not how.page_only:
            costs = afford.costs([cell for cell in left if not cell.waits], Evidence.of(study, known).points)
            say("; ".join(afford.described(costs, how.budget)))
            ready = afford.afforded(costs, how.budget)
        counted = [cell for cell in left if cell.done] + ready
        if not ready or not _do(counted, study, how, local) or how.budget is not None:
            return all(cell.done for cell in left)
        study = settled(study, known)


def settled(study: Study, known: Evidence | None) -> Study:
    """Return the study with the rates for `best_rate`: the best of each finished grid, unless it is at an edge."""
    rates = study.learning_rates()
    if rates is None or not any(series.best_rate for series in study.config.series):
        return study
    plain = replace(study, best={})
    grids = [cell for cell in plain.runs(rates) if not cell.waits]
    found = Evidence.of(plain, known, grids)
    left = {(cell.group, cell.size) for cell in grids if not found.has(cell)}
    best = {key: one for key, one in best_rates(found.points).items() if key not in left}
    for (variant, size), one in best.items():
        if one.at_edge:
            say(f"{variant}, {size}: the best rate {one.lowest:g} is at an edge of {[*one.losses]}: extend its grid")
    return replace(study, best={key: one.lowest for key, one in best.items() if not one.at_edge})


def _do(cells: Sequence[Cell], study: Study, how: HowToRun, local: Local) -> bool:
    """Train or submit cells; return whether all are done."""
    if how.page_only or all(cell.done for cell in cells):
        return all(cell.done for cell in cells)
    if how.slurm:
        submit_jobs(cells, study.folder / "configs", how.sbatch, how.gpus, how.time, say)
        say("run the same command again when these jobs have ended")
        return False
    return local.train(cells)


def write_page(study: Study, how: HowToRun, known: Evidence | None, measures: bool) -> Path:
    """Write the results, the page and, into a folder, the main charts of what is finished.

    measures: first look at the routers of a study with branches, and time its models. A stop does not wait for that.
    """
    cells = study.cells()
    if measures or not study.config.has_branches:
        if (analysis := _analysis(study)) is not None:
            analysis.measure(study, cells, say)
        with working("measuring generation"):
            generation.measure(study.folder, cells)
        length.measure(study, cells, say)
    found = Evidence.of(study, known)
    found.write(study.folder / ("points.json" if study.config.has_branches else "results.json"))
    return draw(found, study, how)


def draw(found: Evidence, study: Study, how: HowToRun) -> Path:
    """Write the page and the pictures of what is finished, and print what it says."""
    path, analysis = study.folder / "study.html", _analysis(study)
    report = (analysis or page).report(study, found)
    atomic.write_text(path, page.render(study, found, report))
    if how.png is not None:
        write_pictures(how.png, report.pictures)
    for part in report.said:
        (print if isinstance(part, str) else Console().print)(part)
    print(path)
    if analysis is None and study.config.has_branches:
        say("the analysis of such studies is in the folder studies/ of the repository: repeat --page in a clone of it")
    if how.tables:
        print("", *(part.markdown() for part in report.parts if isinstance(part, Table) and part.rows), sep="\n")
    return path


def _analysis(study: Study) -> Any:
    """Return the module that analyses a study, or None where only the package is installed."""
    if not study.config.has_branches:
        return None
    if (root := str(Path(__file__).resolve().parents[2])) not in sys.path:
        sys.path.append(root)
    try:
        found = importlib.import_module(ANALYSIS)
    except ModuleNotFoundError as error:
        if error.name == "scipy":
            raise StudyError(
                "the analysis of studies on trunks and branches needs scipy: pip install -e '.[studies]'"
            ) from None
        if error.name not in (ANALYSIS, ANALYSIS.partition(".")[0]):
            raise
        return None
    return found if hasattr(found, "report") else None  # or else it is the folder of a study's output


def say(line: str) -> None:
    """Tell the user on standard error."""
    print(f"blackmamba: {line}", file=sys.stderr, flush=True)
