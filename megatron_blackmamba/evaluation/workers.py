"""Batches scored by this process, or by several with a copy of the model each: one a GPU, or sharing the cores."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.console.cores import usable_cores
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.scoring import Batch, Score, score, score_all
from megatron_blackmamba.inference import Decoder, load
from megatron_blackmamba.runtime.parent import die_with_parent

Done = Callable[[Batch, list[Score]], None]


@dataclass(frozen=True)
class Load:
    """The options for loading the model in a process."""

    model: Path
    dtype: torch.dtype | None
    tokenizer: Path | None = None
    ema: bool = False

    def __call__(self, device: str | None) -> Decoder:
        return load(self.model, dtype=self.dtype, device=device, tokenizer=self.tokenizer, ema=self.ema).decoder


class Pool:
    """Processes that score batches; they load the model at the first batch."""

    def __init__(self, load_model: Load, processes: int, device: str | None):
        if processes < 1:
            raise EvaluationError(f"--nproc {processes}: use at least one process")
        self.processes = processes
        context = interrupts.spawn_context()
        devices = context.Queue()
        for number in range(processes):
            devices.put(_device(device, number))
        threads = max(1, usable_cores() // processes)
        self._pool = ProcessPoolExecutor(
            processes, context, initializer=_begin, initargs=(load_model, devices, threads, os.getpid())
        )

    def score_all(self, batches: Sequence[Batch], batch_tokens: int, done: Done) -> None:
        """Score batches; call `done` after each, in the order in which they end."""
        running = {self._pool.submit(_score, batch, batch_tokens): batch for batch in batches}
        try:
            for future in as_completed(running):
                done(running[future], future.result())
        except BrokenProcessPool:
            raise EvaluationError(
                "a scoring process ended unexpectedly; finished results are kept. It may have run out of memory:"
                " use fewer processes (--nproc) or smaller batches (--batch-tokens)"
            ) from None

    def close(self) -> None:
        """Stop the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Here:
    """A scorer in this process."""

    def __init__(self, decoder: Callable[[], Decoder]):
        self.decoder = decoder

    def score_all(self, batches: Sequence[Batch], batch_tokens: int, done: Done) -> None:
        """Score batches one after another."""
        if batches:
            score_all(self.decoder(), batches, batch_tokens, done)

    def close(self) -> None:
        """Do nothing: there is no process to stop."""


def default_processes(device: str | None) -> int:
    """Return the number of GPUs, or 1 on a CPU, whose cores one process shares among its threads."""
    return torch.cuda.device_count() if device is None and torch.cuda.is_available() else 1


def _device(wanted: str | None, number: int) -> str | None:
    if wanted == "cpu" or not torch.cuda.is_available():
        return wanted
    return wanted if wanted and ":" in wanted else f"cuda:{number % torch.cuda.device_count()}"


_DECODER: list[Decoder] = []
"""The model of a scoring process."""


def _begin(load_model: Load, devices: Any, threads: int, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(threads)
    _DECODER.append(load_model(devices.get()))


def _score(batch: Batch, batch_tokens: int) -> list[Score]:
    with torch.inference_mode():
        return score(_DECODER[0], batch, batch_tokens)
