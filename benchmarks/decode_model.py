"""Model the time of each decode kernel on an H200, from its compiled form, without a GPU.

    python -m benchmarks.decode_model [--rows 1 8 64 256]

A kernel lasts as long as memory takes for its weights and states, or as its programs take in waves: registers and
shared memory say how many run at once. A program takes some latency, its instructions outside loops, and a fixed time
for each block of columns. Experts are chosen evenly. The kernels of 2026-11-26 were measured at 1.2 to 1.5 times what
this says of them, so compare forms of a kernel by it. Left out are the last norm and the choice of the likeliest token,
and that kernels for one sequence start before the one before has ended.
"""

import argparse
from functools import partial
from math import ceil
from typing import Any
from unittest import mock

import torch
from triton import cdiv

from benchmarks import _common
from benchmarks.decode_launches import BYTES_A_MS, LAUNCH_MS
from benchmarks.triton_resources import EXPERTS, Kernel, decoding_launches, kernels_of
from megatron_blackmamba.ops.decoding.triton import Launch

LAYERS = 15
PROCESSORS, REGISTERS, SHARED_BYTES, WARPS = 132, 65536, 227 * 1024, 64
CYCLES_A_MS, SCHEDULERS = 1.755e6, 4
FIRST_MS, BLOCK_MS = 0.0015, 0.0004
"""From a program's start to its end without loops, and one block of columns: from an H100's times of kernels alone."""
Row = dict[str, Any]


def table(rows: int) -> list[Row]:
    """Return the kernels of one layer of each kind, of the embedding and of the head."""
    launched: list[tuple[str, tuple[int, ...], int, tuple[Any, ...], dict[str, Any]]] = []
    launch = Launch.__call__

    def record(self: Launch, kernel: Any, grid: tuple[int, ...], *tensors: Any, tiling: Any, **constants: Any) -> None:
        launched.append((kernel.fn.__name__, grid, tiling.warps, tensors, constants))
        launch(self, kernel, grid, *tensors, tiling=tiling, **constants)

    with mock.patch.object(Launch, "__call__", record):
        compiled = kernels_of(partial(decoding_launches, rows=rows), 90)
    return [_row(_compiled(compiled, each[0], each[4]), rows, *each) for each in launched]


def _compiled(kernels: list[Kernel], name: str, constants: dict[str, Any]) -> Kernel:
    """Return the compiled form of a launched kernel."""
    return next(
        each
        for each in kernels
        if each.name == name and all(constants.get(k, v) == v for k, v in each.constants.items())
    )


def _row(
    kernel: Kernel, rows: int, name: str, grid: tuple[int, ...], warps: int, tensors: tuple[Any, ...], constants: Any
) -> Row:
    held = [each for each in tensors if isinstance(each, torch.Tensor) and name != "embed"]
    chosen = 1 - (1 - 1 / EXPERTS) ** rows
    by_expert = "expert" in name or "gated" in name or constants.get("ROUTED")
    moved = sum(
        each.nbytes * (chosen if by_expert and each.dim() == 3 else 1) for each in held if each.element_size() == 2
    )
    moved += sum(2 * each.nbytes for each in held if each.dim() == 3 and each.shape[-1] == constants.get("N"))
    programs = 1
    for size in grid:
        programs *= size
    if by_expert and rows > 1:
        programs = ceil(programs * chosen)
    by_registers = REGISTERS // (ceil(kernel.registers / 8) * 8 * 32 * warps)
    at_once = min(by_registers, SHARED_BYTES // (kernel.shared_bytes + 1024), WARPS // warps)
    waves = ceil(programs / (PROCESSORS * at_once))
    columns = constants.get("F" if name.startswith("add_expert") else "C", constants.get("D", 0))
    blocks = cdiv(columns, constants["BLOCK"]) if "BLOCK" in constants and name.endswith("_rows") else 0
    if by_expert and rows > EXPERTS:  # the busiest experts have more than the mean by two deviations
        mean = rows / EXPERTS
        blocks *= ceil((mean + mean**0.5) / constants.get("TOKENS", rows))
    beside = min(at_once, cdiv(programs, PROCESSORS))
    issued = kernel.instructions * warps / SCHEDULERS / CYCLES_A_MS * beside
    ms = LAUNCH_MS + max(moved / BYTES_A_MS, waves * (FIRST_MS + blocks * BLOCK_MS + issued))
    return {
        "kernel": name, "programs": programs, "registers": kernel.registers, "at once": PROCESSORS * at_once,
        "waves": waves, "MB": moved / 1e6, "us": 1e3 * ms, "memory us": 1e3 * moved / BYTES_A_MS,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="numbers of sequences")
    for number in parser.parse_args().rows:
        found = table(number)
        ends = sum(each["us"] for each in (found[0], found[-1]))
        step = LAYERS * sum(each["us"] for each in found[1:-1]) + ends
        print(f"{number} sequences, calculated: {step / 1e3:.2f} ms a step of {LAYERS} layers of each kind")
        print(_common.table(found), flush=True)


if __name__ == "__main__":
    main()
