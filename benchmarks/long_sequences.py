"""How a step's memory and time grow with the length of one sequence, on one process and cut over two or more.

    python -m benchmarks.long_sequences [CONFIG] [a.b=c ...] [--lengths 16384 65536 262144] [--contexts 1 2] [--json]

For each length and each `parallel.context`, that many processes take one step on one sequence of random tokens, after a
step on a short one that warms up. Memory is what the second step adds to a rank at its peak, the most of all ranks.
Time is by the wall. Each process computes with one thread, so one that is alone leaves the other cores idle. Without a
configuration: a tiny width. Linux only: it reads /proc.
"""

import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import _common
from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.runtime.ports import free_port

TINY = ("model.hidden_size=32", "model.expert_hidden_size=64", "model.vocab_size=128", "model.experts=4")
RUN = ("training.global_batch=1", "training.micro_batch=1", "training.precision=fp32", "training.overlap=false")
MIB = 2**20
SHORT = 4096
"""Tokens that warm up."""


def main() -> None:
    from megatron_blackmamba.engine import changes

    parser = _common.arguments(__doc__)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    parser.add_argument("--lengths", type=int, nargs="+", default=(16384, 65536, 262144))
    parser.add_argument("--contexts", type=int, nargs="+", default=(1, 2))
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes.install()  # imports megatron-core once, for all ranks
    words = options.config if any("=" not in word for word in options.config) else ["tiny", *TINY, *options.config]
    rows = []
    for length in options.lengths:
        alone = None
        for context in options.contexts:
            ranks = _ranks([*words, *RUN, f"data.sequence_length={length}", f"parallel.context={context}"], context)
            peak = max(rank["peak"] for rank in ranks)
            alone = alone or peak
            rows.append(
                {
                    "tokens": f"{length:,}",
                    "context": context,
                    "loss": f"{sum(rank['loss'] for rank in ranks) / context:.5f}",
                    "MiB a rank": peak / MIB,
                    "times the first": peak / alone,
                    "s a step": max(rank["wall"] for rank in ranks),
                    "CPU s a rank": max(rank["cpu"] for rank in ranks),
                }
            )
    config = _load([*words, *RUN])
    title = f"one sequence, {config.model.pattern} of {config.model.hidden_size}"
    _common.show({"machine": _common.machine("megatron-core"), "tables": {title: rows}}, options.json)


def _load(words: list[str]) -> RunConfig:
    return load([word for word in words if "=" not in word], [word for word in words if "=" in word])


def _ranks(words: list[str], count: int) -> list[dict[str, float]]:
    """Fork the ranks and return what each measured."""
    port = free_port()
    fork = multiprocessing.get_context("fork")
    children = []
    for rank in range(count):
        ours, theirs = fork.Pipe(duplex=False)
        place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        child = fork.Process(target=_rank, args=(words, {k: str(v) for k, v in place.items()}, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    try:
        return [ours.recv() for _, ours in children]
    finally:
        for child, _ in children:
            child.join()


def _rank(words: list[str], place: dict[str, str], answer: Connection) -> None:
    from megatron_blackmamba import model
    from megatron_blackmamba.runtime import memory, world
    from megatron_blackmamba.training.step.optimizer import make_trainable
    from megatron_blackmamba.training.step.step import Step

    os.environ.update(place)
    memory.keep_freed_memory = lambda: None  # or the peak of the first step would stay
    world.keep_freed_memory = lambda: None  # type: ignore[attr-defined]
    config = _load(words)
    us, length = world.start(config.parallel), config.data.sequence_length
    trainable = make_trainable(config, model.build(config, us), us)
    step = Step(config, us, trainable, sources=1)
    measured: dict[str, Any] = {}
    for batch in (_batch(config, us.context_rank, min(SHORT, length)), _batch(config, us.context_rank, length)):
        before = _reset_peak()
        wall, cpu = time.perf_counter(), time.process_time()
        measured["loss"] = step.gradients(iter([batch])).loss
        step.update()
        measured |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        measured["peak"] = _status("VmHWM") - before
    answer.send(measured)
    world.shutdown()


def _batch(config: RunConfig, part: int, length: int) -> dict[str, torch.Tensor]:
    context = config.parallel.context
    text = torch.randint(config.model.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(length))
    first = part * length // context
    here = slice(first, (part + 1) * length // context)
    before = {"before": text[:, first - 1] if part else torch.full((1,), -1)} if context > 1 else {}
    return {
        **before,
        "tokens": text[:, :-1][:, here].contiguous(),
        "labels": text[:, 1:][:, here].contiguous(),
        "loss_mask": torch.ones(1, length // context),
        "source_ids": torch.zeros(1, dtype=torch.int64),
        "sample_ids": torch.zeros(1, dtype=torch.int64),
    }


def _reset_peak() -> int:
    """Give freed memory back, have the kernel count the peak anew, and return the bytes in memory now."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
