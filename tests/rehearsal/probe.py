"""Rehearse every case, each in a fork of one process; print what was recorded as JSON."""

from benchmarks.rehearsal import fake_cuda  # isort: skip  (before torch)

import json
import multiprocessing
import sys
import traceback
from collections import Counter
from typing import Any

from benchmarks.rehearsal.record import Op
from benchmarks.rehearsal.step import Rehearsed, rehearse, warm_up
from megatron_blackmamba.config import load
from megatron_blackmamba.layers import Work
from megatron_blackmamba.plan import gpus, roofline
from megatron_blackmamba.runtime.process import freeze_gc
from tests.rehearsal.cases import CASES

PHASES = ("forward", "backward", "update")


def record_of(name: str) -> dict[str, Any]:
    case = CASES[name]
    try:
        return summary(rehearse(load(case.config, case.overrides), case.ranks))
    except Exception:
        return {"error": traceback.format_exc()[-4000:]}


def summary(step: Rehearsed) -> dict[str, Any]:
    log = step.log
    return {
        "patches": step.applied,
        "waits": log.waits,
        "odd": log.odd,
        "peak": log.peak,
        "zeroed": sum(op.moved for op in log.ops if "zero_" in op.name),
        "micro_batches": step.micro_batches,
        "layers": "".join(step.layers.values()),
        "launches": launches(step),
        "seconds": {phase: sum(seconds_of(op) for op in log.ops if op.phase == phase) for phase in PHASES},
        "kernels": sorted({op.name.split()[1] for op in log.ops if op.name.startswith(("triton ", "cuda "))}),
    }


def seconds_of(op: Op) -> float:
    return roofline.seconds(Work(op.moved, op.flops, op.slots, op.launches), gpus.KNOWN["h200"], op.precision)


def launches(step: Rehearsed) -> dict[str, dict[str, int]]:
    """Return the most launches of a layer in a micro-batch, by letter and direction."""
    counted: Counter[tuple[int, str]] = Counter()
    for op in step.log.ops:
        if op.place.layer is not None:
            counted[op.place.layer, op.phase] += op.launches
    most: dict[str, dict[str, int]] = {}
    for (layer, phase), number in counted.items():
        of_letter = most.setdefault(step.layers[layer], {})
        of_letter[phase] = max(of_letter.get(phase, 0), -(-number // step.micro_batches))
    return most


def main(names: list[str]) -> None:
    fake_cuda.become_gpu()
    warm_up()
    freeze_gc()  # before the forks, which would each look through all of it
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # ranks have one world a process
        found = pool.map(record_of, names, chunksize=1)
    print(json.dumps(dict(zip(names, found, strict=True))), file=sys.__stdout__)


if __name__ == "__main__":
    main(sys.argv[1:])
