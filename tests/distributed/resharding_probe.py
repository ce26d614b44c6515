"""One run carried from layout to layout by its checkpoints, and the same run left alone.

In float64 its batch grows, its learning rate decays at the end, and it goes on as a branch, and as a branch of that.

`python -m tests.distributed.resharding_probe FOLDER PRECISION...`
"""

import json
import sys
import warnings
from pathlib import Path

import torch

from megatron_blackmamba.config import load
from megatron_blackmamba.data import plan
from megatron_blackmamba.training.loop import train
from tests.runtime.ranks import fork_ranks, import_once

STEPS_EACH = 2
HELD_OUT_SAMPLES = 13
"""A full batch for a validation, and five samples of another."""
Leg = tuple[int, list[str]]
LEGS: list[Leg] = [
    (2, ["parallel.expert=2"]),
    (2, ["parallel.tensor=2"]),
    (2, ["parallel.context=2"]),
    (2, ["parallel.pipeline=2"]),
    (1, []),
    (2, ["parallel.tensor=2", "parallel.expert=2"]),
    (2, []),
    (2, ["parallel.expert=2"]),
]
FEW_LEGS = [LEGS[0], LEGS[1], LEGS[3], LEGS[4], LEGS[6]]
"""For bf16: what differs from float64 is how the optimizer's fp32 copies are sharded."""


NAMES = ("carried", "branch", "twig")
"""The run that is carried, in float64 its branch from leg 5 on, and the branch's from leg 7 on."""
BATCH, GROWN = 4, 8
"""Sequences of the first 4 steps and of the others, in float64."""


def name_of(precision: str, leg: int) -> str:
    return NAMES[0 if precision != "fp64" or leg < 5 else 1 if leg < 7 else 2]


def legs(precision: str) -> list[Leg]:
    return LEGS if precision == "fp64" else FEW_LEGS


def run(folder: Path, name: str, precision: str, ranks: int, until: int, overrides: list[str]) -> str | None:
    steps = STEPS_EACH * len(legs(precision))
    ramped = 4 if precision == "fp64" else 0
    recipe = [
        f"training.batch_ramp=[{{batch: {BATCH}, until: {32 * BATCH * ramped}}}]",
        *("optimizer.decay=wsd", f"optimizer.decay_tokens={32 * GROWN * 4}", "optimizer.warmup_tokens=300"),
    ]
    if name in NAMES[1:]:
        recipe.append(f"start.branch={folder / NAMES[NAMES.index(name) - 1]}")
    settings = [
        f"folder={folder}",
        f"name={name}",
        f"training.precision={precision}",
        *(["optimizer.moments=bf16", "optimizer.gradients=bf16"] if precision == "bf16" else []),
        "model.pattern=MESE",
        "model.mamba2.head_dim=16",
        "model.mamba2.state_size=16",
        "model.mamba2.groups=2",
        "data.sequence_length=32",
        "training.global_batch=8",
        "training.micro_batch=2",
        f"training.tokens={32 * (GROWN * (steps - ramped) + BATCH * ramped)}",
        *(recipe if ramped else []),
        f"training.stop_after_steps={until}",
        f"training.evaluate_every={STEPS_EACH}",
        "training.evaluate_batches=2",
        "checkpoint.every=0",
        "logging.tensorboard=false",
        "optimizer.weight_decay=0.1",
        f"checkpoint.keep_last={len(legs(precision))}",
        "checkpoint.export_check=none",
        f"checkpoint.export_every={0 if precision == 'fp64' else STEPS_EACH}",
    ]
    config = load("tiny", [*settings, "training.overlap=true", *overrides])
    answers = fork_ranks(ranks, lambda: int(train(config)), alone=ranks == 1)
    return next((a.get("trace") or a["error"] for a in answers if "error" in a), None)


def carry(folder: Path, precision: str) -> dict[str, list]:
    """Run alone, then from layout to layout; return the losses of both."""
    errors = [run(folder, "alone", precision, 1, STEPS_EACH * len(legs(precision)), [])]
    for number, (ranks, overrides) in enumerate(legs(precision), start=1):
        errors.append(run(folder, name_of(precision, number), precision, ranks, number * STEPS_EACH, overrides))
        if errors[-1]:
            break
    seen: dict[str, list] = {"errors": [error for error in errors if error], "validation": []}
    for name, runs in (("alone", ["alone"]), ("carried", NAMES)):
        files = [file for each in runs if (file := folder / each / "metrics.jsonl").is_file()]
        steps = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        seen[name] = [step["loss"] for step in steps]
        seen["validation"].append([step["validation/loss"] for step in steps if "validation/loss" in step])
    return seen


def main(folder: Path, precisions: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import_once()
    plan.HELD_OUT_SAMPLES = HELD_OUT_SAMPLES
    seen = {precision: carry(folder / precision, precision) for precision in precisions}
    print()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
