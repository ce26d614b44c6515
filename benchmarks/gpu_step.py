"""Training steps at full size on one GPU: as many sequences as fit, tokens a second, MFU, and where the time goes.

    python -m benchmarks.gpu_step [MODEL[+a.b=c]] [--beside MODEL[+a.b=c] ...] [--length N] [--sequences N] [--json F]

First, MODEL (blackmamba_340m_1.5b) runs alone, with as many sequences per micro-batch as fit into memory, and with
fewer (--fewer 18 6). Then it takes turns with dense models of equal active size, or with those of --beside, all with
the same number of sequences. A step is training/step/step.py's: gradients of one micro-batch of random tokens, then the
update, in bf16, without data and records. Without a GPU, --sequences is required and there is no MFU.
`--beside MODEL+kernels.cuda_graph=off` compares with micro-batches that are not one launch; two models of 1.5B
and 6 sequences fit into 80 GB.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import _common
from benchmarks._parts import breakdown
from benchmarks._trainer import a_run, step_on_random_tokens
from megatron_blackmamba.config import RunConfig, load

DENSE = ("mamba_343m", "transformer_340m")
WARM_UP = 3  # steps that compile and fill the allocator
SPARE = 0.04  # of the memory: what fragments, and what the driver and libraries take later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="blackmamba_340m_1.5b")
    parser.add_argument("--beside", nargs="*", default=DENSE, metavar="MODEL[+a.b=c]")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, help="instead of as many as fit")
    parser.add_argument("--fewer", type=int, nargs="*", default=[18, 6], metavar="N")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--profiled", type=int, default=2, metavar="STEPS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results there too, rewritten after each part")
    options = parser.parse_args()
    report = Report(options.json)
    settings = (
        f"data.sequence_length={options.length}",
        *("training.precision=bf16", "training.global_batch=1", "training.micro_batch=1"),
    )
    with a_run(["tiny", *options.model.split("+")], *settings) as (config, here, _):
        alone = Subject(options.model, config, here)
        sequences = options.sequences or most_sequences(alone.peak_bytes, capacity())
        report.add("alone", measure([alone], sequences, options.repeats))
        fewer = [number for number in options.fewer if number < sequences]
        report.add("fewer", [row for number in fewer for row in measure([alone], number, options.repeats)])
        parts = profile(alone, sequences, options.profiled, report.ms("alone", options.model))
        report.add("parts", parts.rows())
        report.add("kernels", parts.kernels)
        if not options.beside:
            return
        others = [Subject(name, described(name, settings), here) for name in options.beside]
        together = [alone, *others]
        if not options.sequences:
            sequences = most_sequences(lambda n: most(subject.peak_bytes(n) for subject in together), capacity())
        report.add("beside", measure(together, sequences, options.repeats))


def described(name: str, settings: Sequence[str]) -> RunConfig:
    """Return the config of NAME or NAME+a.b=c."""
    model, *changes = name.split("+")
    return load(["tiny", model], [*settings, *changes])


class Subject:
    """A model that takes steps on any number of sequences."""

    def __init__(self, name: str, config: RunConfig, here: Any):
        from megatron_blackmamba import model as modelling
        from megatron_blackmamba.training.step.optimizer import make_trainable

        self.name, self.config, self.here = name, config, here
        self.trainable = make_trainable(config, modelling.build(config, here), here)

    def step_on(self, sequences: int) -> tuple[Callable[[], Any], Any]:
        """Return a function for the gradients of a step on `sequences` sequences, and the `Step`."""
        shape = self.config.data.sequence_length, sequences
        return step_on_random_tokens(self.config, self.here, self.trainable, *shape, self._tell)

    def _tell(self, news: str) -> None:
        print(f"{self.name}: kernels.cuda_graph: {news}", file=sys.stderr)

    def peak_bytes(self, sequences: int) -> int | None:
        """Return the peak memory of the gradients, without weights and optimizer state, or None if it does not fit."""
        _forget()
        try:
            gradients, step = self.step_on(sequences)
            gradients()
            step.update()  # the first one makes the optimizer's state
            torch.cuda.reset_peak_memory_stats()
            gradients()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            return None  # here the exception is gone, and with it what its traceback held
        finally:
            _forget()

    def flops_a_token(self) -> int:
        from megatron_blackmamba.plan import flops

        return flops.training(self.config.model, self.config.data.sequence_length)


def most_sequences(peak_bytes: Callable[[int], int | None], capacity: int) -> int:
    """The most sequences whose step fits: a line through one and two, then down from there if it was too much."""
    one, two = peak_bytes(1), peak_bytes(2)
    if one is None:
        raise SystemExit("gpu_step: not even one sequence fits into this GPU's memory")
    if two is None:
        return 1
    sequences = max(2, 1 + int((capacity * (1 - SPARE) - one) // max(1, two - one)))
    while sequences > 2 and peak_bytes(sequences) is None:
        sequences -= max(1, sequences // 12)
    return sequences


def capacity() -> int:
    """Bytes that this process can have on its GPU."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def most(values: Any) -> int | None:
    known = list(values)
    return None if None in known else max(known)


def measure(subjects: list[Subject], sequences: int, repeats: int) -> list[dict[str, Any]]:
    """Each subject in turn, `repeats` times after the warm-up: one row each.

    If there are several, each takes a step that is not measured in every turn, and frees the memory of its graph.
    """
    steps = {subject.name: subject.step_on(sequences) for subject in subjects}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    _forget()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for round_ in range(-WARM_UP, repeats):
        for name, (gradients, step) in steps.items():
            if len(steps) > 1:
                gradients(), step.update()
            taken = clocked(gradients, step.update)
            if round_ >= 0:
                times[name].append(taken)
            if len(steps) > 1:
                step.make_room()
    for _, step in steps.values():
        step.make_room()
    rows = []
    for subject in subjects:
        gradients_ms, update_ms = (statistics.median(column) for column in zip(*times[subject.name], strict=True))
        tokens = sequences * subject.config.data.sequence_length
        per_second = 1e3 * tokens / (gradients_ms + update_ms)
        rows.append(
            {
                "model": subject.name,
                "sequences": sequences,
                "gradients ms": gradients_ms,
                "update ms": update_ms,
                "tokens/s": per_second,
                "GFLOP/token": subject.flops_a_token() / 1e9,
                "MFU": utilisation(per_second * subject.flops_a_token()),
                "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
            }
        )
    return rows


def clocked(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """Milliseconds of each of the calls, which follow each other without a wait in between."""
    if not torch.cuda.is_available():
        return tuple(1e3 * _common.timed(call) for call in calls)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    marks[-1].synchronize()
    return tuple(before.elapsed_time(after) for before, after in pairwise(marks))


def utilisation(flops_a_second: float) -> str | None:
    """Return the fraction of the GPU's bf16 peak, or None if the peak is unknown."""
    from megatron_blackmamba.training.watch.speed import known_gpu

    gpu = known_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return f"{flops_a_second / gpu.peak('bf16'):.1%}" if gpu else None


def profile(subject: Subject, sequences: int, steps: int, step_ms: float) -> Any:
    _forget()
    gradients, step = subject.step_on(sequences)
    step.graphs.wanted = False  # a graph's kernels belong to no operation
    gradients(), step.update()
    return breakdown(subject.trainable.model, gradients, step.update, steps, step_ms)


class Report:
    """Prints each table when it is there, and keeps all of them in a file."""

    def __init__(self, file: Path | None):
        self.file, self.output = file, sys.stdout  # what a run says itself goes nowhere
        self.result: dict[str, Any] = {"machine": _common.machine("megatron-core", "triton", "mamba-ssm"), "tables": {}}
        print(json.dumps(self.result["machine"]), file=self.output, flush=True)
        self.begun = time.monotonic()

    def add(self, title: str, rows: list[dict[str, Any]]) -> None:
        self.result["tables"][title] = rows
        if rows:
            heading = f"{title}, after {time.monotonic() - self.begun:.0f} s"
            print(f"\n{heading}\n{_common.table(rows)}", file=self.output, flush=True)
        if self.file:
            self.file.write_text(json.dumps(self.result, indent=1))

    def ms(self, title: str, model: str) -> float:
        (row,) = (row for row in self.result["tables"][title] if row["model"] == model)
        return row["gradients ms"] + row["update ms"]


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
