"""Time of a token and size of the state against length, of the models that a study has trained."""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.inference import load
from megatron_blackmamba.study.runs import Cell

LENGTHS = (16, 64, 256, 1024, 2048)
STEPS = 16
FILE = "generation.json"


def read(folder: Path) -> list[dict[str, Any]]:
    """Return what has been measured in a study's folder."""
    path = folder / FILE
    return json.loads(path.read_bytes()) if path.is_file() else []


def measure(folder: Path, cells: Sequence[Cell]) -> None:
    """Measure one finished model of each variant and size that has not been measured yet."""
    measured = read(folder)
    known = {(one["group"], one["size"]) for one in measured}
    for cell in cells:
        if cell.kind == "run" and cell.done and (cell.group, cell.size) not in known:
            known.add((cell.group, cell.size))
            measured.append({"group": cell.group, "size": cell.size, **_of(cell)})
            atomic.write_json(folder / FILE, measured)


@torch.inference_mode()
def _of(cell: Cell) -> dict[str, Any]:
    decoder = load(cell.folder.root, dtype=torch.float32, device="cpu").decoder
    milliseconds, sizes = [], []
    for length in LENGTHS:
        state = decoder.start(1)
        decoder.read(state, torch.ones(1, length, dtype=torch.long))
        sizes.append(state.bytes)
        token, seconds = torch.ones(1, dtype=torch.long), []
        for _ in range(STEPS):
            begun = time.perf_counter()
            decoder.step(state, token)
            seconds.append(time.perf_counter() - begun)
        milliseconds.append(1000 * statistics.median(seconds))
    return {"lengths": LENGTHS, "milliseconds": milliseconds, "bytes": sizes}
