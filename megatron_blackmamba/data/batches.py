"""From samples to the micro-batches of one data-parallel rank, read ahead by threads.

A global batch is the next `global_batch` samples; micro-batch j of it, samples j·micro_batch onwards, goes to rank
j mod dp_size. So the same samples meet in the same micro-batches whatever the number of ranks, and the position of
every rank is one and the same integer: the next sample.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.data.datasets import DataError
from megatron_blackmamba.formats.shards import ShardError
from megatron_blackmamba.runtime import device

Batch = dict[str, Tensor]
"""tokens, labels, loss_mask [B, S]; source_ids, sample_ids [B].

Parts of sequences also have before and after [B]: the token before the part, or -1 where the sequence begins; the label
after it, or -1 where the sequence ends or that label does not count."""


def micro_batches_of(samples: Sequence[int], micro_batch: int, rank: int, ranks: int) -> list[Sequence[int]]:
    """Return the micro-batches of a global batch that one data-parallel rank reads."""
    if len(samples) % (micro_batch * ranks):
        raise DataError(
            f"a global batch of {len(samples)} samples does not divide into micro-batches of {micro_batch} on {ranks}"
            " data-parallel ranks: change training.global_batch, training.micro_batch or the GPU count"
        )
    return [samples[first : first + micro_batch] for first in range(0, len(samples), micro_batch)][rank::ranks]


def place_of_part(length: int, number: int, parts: int) -> slice:
    """Return the place in each sequence of the part that one context-parallel rank reads."""
    first = number * (length // parts)
    return slice(first, first + length // parts)


class BatchStream:
    """An iterator over the micro-batches of one rank, one global batch after another."""

    def __init__(
        self,
        dataset: Any,
        *,
        start_sample: int = 0,
        global_batch: int | Callable[[int], int],
        micro_batch: int | None,
        dp_rank: int = 0,
        dp_size: int = 1,
        part: tuple[int, int] = (0, 1),
        workers: int = 2,
        passed_over: Sequence[tuple[int, int]] = (),
        stop_sample: int | None = None,
        source_id: int = 0,
    ) -> None:
        """Open a stream of batches.

        Args:
            global_batch: Samples of a global batch; or a function that gives it from the samples served before.
            micro_batch: Samples of a micro-batch; None serves global batches, to one rank.
            part: Index and number of contiguous parts of each sequence; the stream serves one part.
            passed_over: First and last sample of each range never served, for example after rewinding past a spike.
            stop_sample: Sample at which the stream ends; None means never. The last global batch is padded with samples
                that do not count (loss_mask 0, sample_ids -1).
            source_id: Source of all samples, for a dataset with one source.
        """
        self.dataset = dataset
        self.position = start_sample
        """The next global sample, once every micro-batch of the current global batch was taken: for the checkpoint."""
        self.micro_batch = micro_batch
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.part = part
        self.passed_over = sorted((int(first), int(last)) for first, last in passed_over)
        self.stop_sample, self.source_id = stop_sample, source_id
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "read-ahead") if workers else None
        self._ahead: deque[tuple[Future | Batch, int | None]] = deque()
        self._served: list[tuple[Batch, int | None]] = []  # of the current global batch
        self._size_after = global_batch if callable(global_batch) else lambda served: global_batch
        self._parts_of(range(self._size_after(0)))  # or refuse them
        self._planned = self._plan(start_sample)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._pool:
            for samples, position in islice(self._planned, max(0, 1 + 2 * self._workers - len(self._ahead))):
                self._ahead.append((self._pool.submit(self._read, samples), position))
        elif not self._ahead:  # a whole global batch at once, while the CPU caches still hold the reading code
            for samples, position in self._planned:
                self._ahead.append((self._read(samples), position))
                if position is not None:
                    break
        if not self._ahead:
            self.close()
            raise StopIteration
        reading, position = self._ahead.popleft()
        batch = reading.result() if isinstance(reading, Future) else reading
        if self._served and self._served[-1][1] is not None:
            self._served = []
        self._served.append((batch, position))
        if position is not None:
            self.position = position
        return batch

    def again(self) -> None:
        """Serve the micro-batches of the last global batch once more."""
        self._ahead.extendleft(reversed(self._served))
        self._served = []

    def close(self) -> None:
        """Stop reading ahead. Iterating on is then an error."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan(self, sample: int) -> Iterator[tuple[Sequence[int], int | None]]:
        """Yield the samples of this rank's micro-batches; at the end of a global batch, also the position after it."""
        served = 0
        while self.stop_sample is None or self._next(sample) < self.stop_sample:
            global_batch, samples = self._size_after(served), []
            served += global_batch
            for _ in range(global_batch):
                sample = self._next(sample)
                inside = self.stop_sample is None or sample < self.stop_sample
                samples.append(sample if inside else -1)
                sample += inside
            *before, last = self._parts_of(samples)
            yield from ((micro_batch, None) for micro_batch in before)
            yield last, sample

    def _parts_of(self, samples: Sequence[int]) -> list[Sequence[int]]:
        return micro_batches_of(samples, self.micro_batch or len(samples), self.dp_rank, self.dp_size)

    def _next(self, sample: int) -> int:
        for first, last in self.passed_over:
            if first <= sample <= last:
                sample = last + 1
        return sample

    def _read(self, samples: Sequence[int]) -> Batch:
        rows = [self._row(max(sample, 0)) for sample in samples]
        here = place_of_part(len(rows[0]["tokens"]), *self.part)
        batch = {key: torch.stack([row[key][here] for row in rows]) for key in ("tokens", "labels", "loss_mask")}
        if self.part[1] > 1:
            none = torch.tensor(-1)
            counts = [here.stop < len(row["labels"]) and row["loss_mask"][here.stop] > 0 for row in rows]
            batch["before"] = torch.stack([row["tokens"][here.start - 1] if here.start else none for row in rows])
            batch["after"] = torch.stack(
                [row["labels"][here.stop] if known else none for row, known in zip(rows, counts, strict=True)]
            )
        batch["source_ids"] = torch.tensor([row.get("dataset_id", self.source_id) for row in rows])
        batch["sample_ids"] = torch.tensor(samples)
        if -1 in samples:
            batch["loss_mask"] *= (batch["sample_ids"] >= 0)[:, None]
        if device.has_cuda():  # copies to the GPU then run beside the host
            return {name: x.pin_memory() for name, x in batch.items()}
        return batch

    def _row(self, sample: int) -> dict[str, Any]:
        try:
            return self.dataset[sample]
        except ShardError as error:
            raise type(error)(f"sample {sample}: {error}") from None
