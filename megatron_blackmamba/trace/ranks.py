"""The share of a step's batch that one rank of a layout reads, by the functions that training reads it by."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_blackmamba.config import ParallelConfig, RunConfig
from megatron_blackmamba.data.batches import micro_batches_of, place_of_part
from megatron_blackmamba.formats.events import read_events
from megatron_blackmamba.formats.lasting_events import lasting_starts
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.runtime import world
from megatron_blackmamba.trace.documents import Piece
from megatron_blackmamba.trace.steps import TraceError

AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "etp": "expert_tensor"}

CHANGE = re.compile(r"(training\.micro_batch|parallel\.\w+): \d+ from step (\d+) on, (\d+) before")
"""As the event of a resume says it."""


@dataclass(frozen=True)
class Share:
    """The part of a batch that a rank reads."""

    micro_batches: list[Sequence[int]]
    here: slice
    """The place of its part in each sequence."""
    place: dict[str, int]
    """Its number in each group of ranks that has several, such as {"tensor": 1, "data": 2}; tensor counts fastest."""

    def numbered(self) -> list[tuple[int, int]]:
        """Return the samples in order, each with the number of its micro-batch."""
        return [(sample, number) for number, samples in enumerate(self.micro_batches) for sample in samples]

    def clipped(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield what lies in the rank's part: its inputs and the label of the last one."""
        for piece in pieces:
            first = max(self.here.start - piece.position, 0)
            ids = piece.ids[first : max(self.here.stop + 1 - piece.position, 0)]
            if len(ids):
                yield replace(piece, position=piece.position + first, first_token=piece.first_token + first, ids=ids)


@dataclass(frozen=True)
class Job:
    """The job that took a step, as far as it decides the shares of its ranks."""

    parallel: ParallelConfig
    processes: int | None
    micro_batch: int


def job_at(run: Path, config: RunConfig, step: int) -> Job:
    """Return the job that took a step: the run's config, without what later resumes changed."""
    before: dict[str, int] = {}
    processes = None
    for start in lasting_starts([each.event for each in read_events(RunFolder(run).events)]):
        for change in getattr(start, "changes", ()):
            found = CHANGE.match(change)
            if found and step < int(found[2]):
                before.setdefault(found[1], int(found[3]))
        if start.step is not None and start.step < step:
            processes = start.processes or processes
    rows = before.pop("training.micro_batch", config.training.micro_batch)
    sizes = {name.removeprefix("parallel."): size for name, size in before.items()}
    return Job(config.parallel.model_copy(update=sizes), processes, rows)


def share_of(
    config: RunConfig, samples: Sequence[int], rank: int, parallel: ParallelConfig, processes: int, rows: int
) -> Share:
    """Return what a rank reads of a batch in a layout, with so many rows a micro-batch; refuse an impossible layout."""
    if rank >= processes:
        raise TraceError(f"--rank {rank}: the last of {processes} is rank {processes - 1}. Add --processes N")
    with world.fake(parallel, processes, rank) as place:
        micro_batches = micro_batches_of(samples, rows, place.data_rank, place.data_size)
        here = place_of_part(config.data.sequence_length, place.context_rank, parallel.context)
        groups = {
            "tensor": (place.tensor_rank, parallel.tensor),
            "context": (place.context_rank, parallel.context),
            "data": (place.data_rank, place.data_size),
            "pipeline": (place.pipeline_rank, parallel.pipeline),
        }
        return Share(micro_batches, here, {name: number for name, (number, size) in groups.items() if size > 1})


def parse_layout(text: str) -> ParallelConfig:
    """Return the layout that tp2,ep2,cp2 names; what it does not name is 1."""
    sizes = {}
    for each in text.lower().split(","):
        found = re.fullmatch(r"([a-z]+)([1-9]\d*)", each.strip())
        if not found or found[1] not in AXES:
            raise TraceError(f"--layout {text}: {each!r} is none of {', '.join(f'{axis}N' for axis in AXES)}")
        sizes[AXES[found[1]]] = int(found[2])
    return ParallelConfig.model_validate(sizes)
