"""The loss by position of the models that a study has trained, far beyond their training length."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_blackmamba.evaluation.evaluate import Options, evaluate
from megatron_blackmamba.formats.evaluations import Evaluation, TaskResult, read_run
from megatron_blackmamba.report import length
from megatron_blackmamba.study.corpus import SOURCES
from megatron_blackmamba.study.runs import Cell, Study


def measure(study: Study, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
    """Read the validation documents of the corpus with each finished model of the first seed; once each."""
    if (wanted := study.config.length) is None:
        return
    texts = tuple(str(study.corpus.text / source / "validation.jsonl") for source in SOURCES)
    how = Options((length.LOSS,), torch.float32, texts, length=wanted.tokens, limit=wanted.sequences, device="cpu")
    for cell in _chosen(study, cells):
        say(f"reading {wanted.tokens:,} tokens with {cell.name}")
        evaluate(cell.folder.root, how)


def results(study: Study, cells: Sequence[Cell]) -> dict[str, TaskResult]:
    """Return what has been measured, by variant or ablation."""
    scored = {f"{cell.group}, {cell.size}": read_run(cell.folder.root) for cell in _chosen(study, cells)}
    tasks = {name: found[-1].by_task() for name, found in scored.items() if found}
    return {name: of_run[length.LOSS] for name, of_run in tasks.items() if length.LOSS in of_run}


def section(found: dict[str, TaskResult]) -> str:
    """Return the section of the page; nothing without a result."""
    return length.section({name: Evaluation(name, None, (result,)) for name, result in found.items()})


def draw(found: dict[str, TaskResult], axes: Any) -> bool:
    """Draw the loss by position, and its distance from the same text read in windows."""
    if not found:
        return False
    whole, beyond = axes
    for i, (name, result) in enumerate(found.items()):
        places = [row["to"] for row in result.rows]
        read, windows = ([row[key] for row in result.rows] for key in ("bits_per_byte", "window_bits_per_byte"))
        whole.plot(places, read, color=f"C{i}", label=name)
        whole.plot(places, windows, color=f"C{i}", linestyle="--", linewidth=1)
        beyond.plot(places, [a - b for a, b in zip(read, windows, strict=True)], color=f"C{i}", label=name)
    for axis, title in ((whole, "bits per byte; dashed: in windows"), (beyond, "bits per byte more than in windows")):
        axis.set(xscale="log", xlabel="position", title=title)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.legend()
    return True


def _chosen(study: Study, cells: Sequence[Cell]) -> Iterator[Cell]:
    first = study.config.seeds[0]
    yield from (cell for cell in cells if cell.kind != "tuning" and cell.seed == first and cell.done)
