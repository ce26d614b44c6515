"""A run whose layers are of a kind that the package does not have: trained, stopped, resumed and saved.

`python -m tests.layers.new_kind_probe FOLDER`: imports once, forks the ranks, and prints what they found as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from megatron_blackmamba import layers
from megatron_blackmamba.config import load
from megatron_blackmamba.interchange import megatron
from megatron_blackmamba.interchange.canonical import InterchangeError
from tests.layers.fused import Fused
from tests.layers.running_mean.kind import RunningMean
from tests.runtime.ranks import fork_ranks, import_once

layers.register(RunningMean)
layers.register(Fused)
STEPS = 6
RUN = ["model.pattern=MAEA", "data.sequence_length=32", "training.global_batch=8", "training.micro_batch=4"]
FP64 = ["training.precision=fp64"]  # layouts are compared in it: no rounding decides between two experts
FUSED = [*FP64, "model.pattern=FE"]
RUN += [f"training.tokens={STEPS * 8 * 32}", "checkpoint.every=3", "logging.tensorboard=false"]


def trained(folder: Path, name: str, *overrides: str) -> None:
    from megatron_blackmamba.training.loop import train

    train(load("tiny", [*RUN, f"folder={folder}", f"name={name}", *overrides]))


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def saved(folder: Path) -> bool:
    """Whether a checkpoint of a model in memory holds its weights."""
    from megatron_blackmamba import build, save

    model = build(load("tiny", RUN))
    save(model, folder / "saved")
    entries = megatron.read(folder / "saved").entries
    return torch.equal(entries["decoder.layers.1.mixer.gain"].load(), model.decoder.layers[1].mixer.gain)


def refused(folder: Path) -> str:
    from megatron_blackmamba import build, export_hf

    try:
        export_hf(build(load("tiny", [*RUN, "model.pattern=FE"])), folder / "refused")
    except InterchangeError as error:
        return str(error)
    return ""


def main(folder: Path) -> dict:
    import_once()
    jobs = {
        "solo": (1, lambda: trained(folder, "solo")),
        "solo_fp64": (1, lambda: trained(folder, "solo_fp64", *FP64)),
        "tp2_fp64": (2, lambda: trained(folder, "tp2_fp64", *FP64, "parallel.tensor=2")),
        "stopped": (1, lambda: trained(folder, "again", "training.stop_after_steps=3")),
        "resumed": (1, lambda: trained(folder, "again")),
        "fused": (1, lambda: trained(folder, "fused", *FUSED)),
        "fused_stopped": (1, lambda: trained(folder, "moved", *FUSED, "training.stop_after_steps=3")),
        "fused_moved": (2, lambda: trained(folder, "moved", *FUSED, "parallel.tensor=2")),
        "saved": (1, lambda: saved(folder)),
        "refused": (1, lambda: refused(folder)),
    }
    answers = {name: fork_ranks(ranks, body)[0] for name, (ranks, body) in jobs.items()}
    names = ("solo", "again", "solo_fp64", "tp2_fp64", "fused", "moved")
    return answers | {"losses": {name: losses(folder, name) for name in names}}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
