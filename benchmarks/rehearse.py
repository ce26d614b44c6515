"""Calculate the time, launches, waits and memory of a training step on a GPU, without a GPU.

    python -m benchmarks.rehearse CONFIG [a.b=c ...] [--ranks N] [--micro-batches N] [--gpu h200]
        [--products SHARE] [--json FILE]

The real trainer takes a step on fake CUDA tensors (benchmarks/rehearsal). Each operation's time is the largest of its
bytes, arithmetic, issue slots and launches at a GPU's speeds (plan/roofline.py). Without communication and waits this
makes the MFU an upper bound. The band shows what cautious assumptions make of it. Nothing here is measured. With
`--products 0.7`, the share of their peak that products were measured to reach, the band becomes narrower.
"""

from benchmarks.rehearsal.requirements import why_not

if reason := why_not():
    raise SystemExit(reason)

from benchmarks.rehearsal import fake_cuda  # isort: skip  (before torch)

if not fake_cuda.torch.cuda.is_available():  # before the package looks for CUDA
    fake_cuda.become_gpu()

from benchmarks.rehearsal.step import Rehearsed, rehearse  # isort: skip

import argparse
import contextlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._common import table
from benchmarks.rehearsal.band import Step, band, if_measured, seconds_of
from benchmarks.rehearsal.record import Op
from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.plan import flops, gpus, memory
from megatron_blackmamba.runtime import layout

GIB = 2**30
SHOWN = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="+", metavar="CONFIG|a.b=c")
    parser.add_argument("--ranks", type=int, help="number of GPUs; default: the fewest of the layout")
    parser.add_argument("--micro-batches", type=int, help="micro-batches per rank; default: as in the global batch")
    parser.add_argument("--gpu", default="h200", choices=gpus.KNOWN, help="GPU of the tables (default h200)")
    parser.add_argument("--products", type=float, metavar="SHARE", help="measured share of the peak of large products")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_intermixed_args()
    overrides = [word for word in options.config if "=" in word]
    config = load([word for word in options.config if "=" not in word], overrides)
    ranks = options.ranks or fewest_ranks(config)
    if options.micro_batches:
        data = layout.data_parallel_size(config.parallel, ranks)
        batch = options.micro_batches * data * config.training.micro_batch
        config = config.model_copy(update={"training": config.training.model_copy(update={"global_batch": batch})})
    with contextlib.redirect_stdout(io.StringIO()):  # the trainer's own lines
        step = rehearse(config, ranks)
    figures = figures_of(step, options.gpu, options.products)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    show(figures)


def fewest_ranks(config: RunConfig) -> int:
    """Return the smallest world that the layout fits."""
    parallel = config.parallel
    return parallel.pipeline * math.lcm(parallel.tensor, parallel.expert * parallel.expert_tensor)


def figures_of(step: Rehearsed, gpu: str, products: float | None = None) -> dict[str, Any]:
    """Return everything that is shown; times for `gpu`, MFU for every known one."""
    measured = {} if products is None else {"product_share": products}
    config, log = step.config, step.log
    share = len(step.layers) / config.model.layers
    useful = step.tokens * share * flops.training(config.model, config.data.sequence_length) / config.parallel.tensor
    chosen = gpus.KNOWN[gpu].model_copy(update=measured)
    waits = sum(step.log.waits.values())
    whole, precision = Step(log.ops, waits, step.ranks, useful), config.training.precision
    planned = memory.of_stage(config, step.ranks, stage=0)
    bound = []
    for known in gpus.KNOWN.values():
        if known.fp8_tflops is None and config.kernels.linear == "fp8":
            continue
        known = known.model_copy(update=measured)
        seconds = sum(seconds_of(op, known) for op in log.ops)
        mfu = useful / seconds / known.peak(config.training.precision)
        bound.append(
            {"GPU": known.name, "ms a step": 1e3 * seconds, "tokens/s": step.tokens / seconds, "MFU": f"{mfu:.1%}"}
        )
    return {
        "title": f"{config.name}: rank 0 of {step.ranks}, {step.micro_batches} micro-batches of "
        f"{config.training.micro_batch} sequences, {len(step.layers)} layers",
        "upper bound, before communication": bound,
        f"MFU between, {chosen.name}": band(whole, chosen, precision, products is not None),
        f"MFU if the products' share is measured, {chosen.name}": if_measured(whole, chosen, precision),
        f"by part, {chosen.name}": grouped(log.ops, chosen, lambda op: op.place.part),
        f"by operation, {chosen.name}": grouped(log.ops, chosen, lambda op: op.name)[:SHOWN],
        "by phase": grouped(log.ops, chosen, lambda op: op.phase),
        "launches a layer and micro-batch": launches(step),
        "the host waits": [{"times": times, "where": where} for where, times in log.waits.most_common()],
        "collectives": [
            {"operation": name, "GB handed over": sum(op.sent for op in ops) / 1e9, "calls": len(ops)}
            for name, ops in by(log.ops, lambda op: op.name).items()
            if name.startswith("c10d::")
        ],
        "memory, GiB": [
            {
                "between steps": step.before / GIB,
                "peak": log.peak / GIB,
                "planned peak": (planned.total - planned.reserved) / GIB,
            }
        ],
    }


def by(ops: list[Op], key: Callable[[Op], Any]) -> dict[Any, list[Op]]:
    groups: dict[Any, list[Op]] = defaultdict(list)
    for op in ops:
        groups[key(op)].append(op)
    return groups


def grouped(ops: list[Op], gpu: gpus.Gpu, key: Callable[[Op], str]) -> list[dict[str, Any]]:
    """Return one row a group, the longest first."""
    whole = sum(seconds_of(op, gpu) for op in ops)
    rows = []
    for name, group in by(ops, key).items():
        seconds = sum(seconds_of(op, gpu) for op in group)
        rows.append(
            {
                "": name,
                "ms": 1e3 * seconds,
                "share": f"{seconds / whole:.1%}",
                "GB": sum(op.moved for op in group) / 1e9,
                "TFLOP": sum(op.flops for op in group) / 1e12,
                "launches": sum(op.launches for op in group),
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])


def launches(step: Rehearsed) -> list[dict[str, Any]]:
    """Return the most of any layer, by letter."""
    rows = []
    for letter in dict.fromkeys(step.layers.values()):
        row: dict[str, Any] = {"layer": letter}
        for phase in ("forward", "backward"):
            of_letter = [op for op in step.log.ops if step.layers.get(op.place.layer) == letter and op.phase == phase]
            most = max(sum(op.launches for op in ops) for ops in by(of_letter, lambda op: op.place.layer).values())
            row[phase] = -(-most // step.micro_batches)
        rows.append(row)
    return rows


def show(figures: dict[str, Any]) -> None:
    print(figures["title"])
    for title, rows in figures.items():
        if isinstance(rows, list) and rows:
            print(f"\n{title}\n{table(rows)}")


if __name__ == "__main__":
    main()
