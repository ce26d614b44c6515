"""Error of gradients that are added up in bf16 over micro-batches, against float64.

    python -m benchmarks.gradient_sums [CONFIG] [a.b=c ...] [--micro-batches 1 2 8 32 128] [--warm-up 20]

A bf16 model makes gradients of many micro-batches. They are added up in bf16, in fp32 and in float64. The table has:

- fp32, bf16: the error of all gradients together
- bf16, worst weight: that of the weight with the largest error
- bf16, lost: how much too short the sum is. It grows if small gradients no longer change a large sum
- of the batch: half the difference between both halves of the micro-batches, the error of a gradient as an estimate

All are relative to the norm of the float64 sum. Without CONFIG: tiny, on synthetic data. One process on CPUs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import _common
from benchmarks._trainer import a_run

MICRO_BATCHES = (1, 2, 8, 32, 128)
PRECISIONS = {"float64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = _common.arguments(__doc__)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument("--warm-up", type=int, default=20, help="steps before the measurement (default 20)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with a_run(options.config, "training.precision=bf16", "data.kind=synthetic") as (config, _, start):
        trainer = start(name="sums")
        for _ in range(options.warm_up):
            trainer.take_step()
        rows = measure(gradients_of(trainer), options.micro_batches)
    batch = f"{config.training.micro_batch} x {config.data.sequence_length} tokens"
    title = f"gradients of {config.name} after {options.warm_up} steps, micro-batches of {batch}"
    _common.show({"machine": _common.machine("megatron-core"), "tables": {title: rows}}, options.json)


def gradients_of(trainer: Any) -> Iterator[list[Tensor]]:
    """Yield the gradients of bf16 weights in one micro-batch after the other."""
    model = trainer.trainable.model
    weights = [weight for weight in model.parameters() if weight.dtype == torch.bfloat16]
    for batch in trainer.batches:
        yield list(torch.autograd.grad(model(batch["tokens"], batch["labels"]).mean(), weights))


def measure(gradients: Iterator[list[Tensor]], counts: list[int]) -> list[dict[str, Any]]:
    """Return a row for each number of micro-batches."""
    sums: dict[str, list[Tensor]] = {}
    halves: dict[int, list[Tensor]] = {}
    rows = []
    for number in range(1, max(counts) + 1):
        found = next(gradients)
        for name, dtype in PRECISIONS.items():
            there = sums.setdefault(name, [torch.zeros_like(g, dtype=dtype) for g in found])
            torch._foreach_add_(there, [g.to(dtype) for g in found])
        if 2 * number in counts:
            halves[2 * number] = [total.clone() for total in sums["float64"]]
        if number in counts:
            rows.append({"micro-batches": number} | errors(sums, halves.get(number)))
    return rows


def errors(sums: dict[str, list[Tensor]], half: list[Tensor] | None) -> dict[str, str]:
    exact = sums["float64"]
    flat = torch.cat([x.flatten() for x in exact])
    wrong = {name: [x.double() - y for x, y in zip(sums[name], exact, strict=True)] for name in ("fp32", "bf16")}
    worst = max(float(e.norm() / x.norm()) for e, x in zip(wrong["bf16"], exact, strict=True) if x.any())
    together = {name: torch.cat([e.flatten() for e in each]) for name, each in wrong.items()}
    found = {name: float(e.norm() / flat.norm()) for name, e in together.items()}
    found["bf16, worst weight"] = worst
    found["bf16, lost"] = float(-(together["bf16"] @ flat) / (flat @ flat))
    row = {name: f"{error:.1e}" for name, error in found.items()}
    noise = None if half is None else torch.cat([(2 * h - x).flatten() for h, x in zip(half, exact, strict=True)])
    return row | {"of the batch": "" if noise is None else f"{float(noise.norm() / flat.norm()):.2g}"}


if __name__ == "__main__":
    main()
