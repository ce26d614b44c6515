"""Continue the training of an imported model on one rank and on several.

`python -m tests.interchange.continued_probe FOLDER`: FOLDER/start is the checkpoint that the importer wrote, and
FOLDER/NAME/metrics.jsonl has the losses of each run.
"""

import json
import os
import sys
from pathlib import Path

import torch

from megatron_blackmamba.config import load
from megatron_blackmamba.training.loop import train
from tests.runtime.ranks import fork_ranks, import_once

RUNS = {
    "alone": (1, []),
    "tp2_ep2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "pp2_cp2": (4, ["parallel.pipeline=2", "parallel.context=2"]),
    "fp32_pp2": (2, ["parallel.pipeline=2", "training.precision=fp32"]),  # files have no float64
}
STEPS = 4


def run(folder: Path, name: str, overrides: list[str]) -> int:
    described = str(folder / "start" / "model.yaml")
    shape = ["data.sequence_length=32", "training.global_batch=4", "training.micro_batch=2", f"training.steps={STEPS}"]
    quiet = ["training.evaluate_every=0", "checkpoint.every=0", "logging.tensorboard=false"]
    names = [f"folder={folder}", f"name={name}", f"start.from={folder / 'start'}", "training.precision=fp64"]
    return int(train(load(["tiny", described], [*shape, *quiet, *names, *overrides])))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    import_once()
    errors = {}
    for name, (ranks, overrides) in RUNS.items():
        answers = fork_ranks(ranks, lambda n=name, o=overrides: run(folder, n, o), alone=ranks == 1)
        problems = [answer.get("trace") or answer["error"] for answer in answers if "error" in answer]
        if problems:
            errors[name] = problems[0]
    print(json.dumps(errors))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
