"""The loss by position of the models that a study has trained, far beyond their training length."""

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_blackmamba.evaluation.evaluate import Options, evaluate
from megatron_blackmamba.formats.evaluations import TaskResult, read_run
from megatron_blackmamba.report.length import LOSS
from megatron_blackmamba.study.corpus import SOURCES
from megatron_blackmamba.study.runs import Cell, Study


def measure(study: Study, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
    """Read the validation documents of the corpus with each finished model of the first seed; once each."""
    if (wanted := study.config.length) is None:
        return
    texts = tuple(str(study.corpus.text / source / "validation.jsonl") for source in SOURCES)
    how = Options((LOSS,), torch.float32, texts, length=wanted.tokens, limit=wanted.sequences, device="cpu")
    for cell in _chosen(study, cells):
        say(f"reading {wanted.tokens:,} tokens with {cell.name}")
        evaluate(cell.folder.root, how)


def results(study: Study, cells: Sequence[Cell]) -> dict[str, TaskResult]:
    """Return what has been measured, by variant or ablation."""
    scored = {f"{cell.group}, {cell.size}": read_run(cell.folder.root) for cell in _chosen(study, cells)}
    tasks = {name: found[-1].by_task() for name, found in scored.items() if found}
    return {name: of_run[LOSS] for name, of_run in tasks.items() if LOSS in of_run}


def _chosen(study: Study, cells: Sequence[Cell]) -> Iterator[Cell]:
    if study.config.length is not None:
        first = study.config.seeds[0]
        yield from (cell for cell in cells if cell.kind != "tuning" and cell.seed == first and cell.done)
