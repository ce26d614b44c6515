"""One run carried from layout to layout by its checkpoints, and the same run left alone.

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


def legs(precision: str) -> list[Leg]:
    return LEGS if precision == "fp64" else FEW_LEGS


def run(folder: Path, name: str, precision: str, ranks: int, until: int, overrides: list[str]) -> str | None:
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
        f"training.tokens={32 * 8 * STEPS_EACH * len(legs(precision))}",
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
        errors.append(run(folder, "carried", precision, ranks, number * STEPS_EACH, overrides))
        if errors[-1]:
            break
    seen: dict[str, list] = {"errors": [error for error in errors if error], "validation": []}
    for name in ("alone", "carried"):
        steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
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
