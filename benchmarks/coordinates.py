"""Coordinate check: how values inside a model depend on its width, with width transfer (model.mup) and without.

    python -m benchmarks.coordinates [CONFIG] [a.b=c ...] [--kinds MS*E-] [--widths 64 128 256 512 1024] [--steps 5]
        [--seeds 1 2 3]

For each kind of layer a model with two layers of it takes some steps on one batch of random tokens. Of the last layer
and the logits, the table has the exponents b in "typical size ~ width^b":

- at first: of the values before the first step
- change: of their change by the steps

With a right rule no change grows or vanishes (b near 0), and no first value grows. Sizes are means over the seeds. One
process on CPUs, in fp32.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _common
from benchmarks._trainer import a_run, on_random_tokens
from megatron_blackmamba import layers
from megatron_blackmamba.config import RunConfig, mup

WIDTHS = (64, 128, 256, 512, 1024)
LENGTH, SEQUENCES = 64, 4
LETTERS = "MSR*E-"
FIXED = (
    "model.mamba2.head_dim=32",
    "model.mamba2.state_size=16",
    "model.mamba3.head_dim=32",
    "model.mamba3.state_size=16",
    "model.attention.heads=4",
    "optimizer.clip=0",
)
FIXED += ("optimizer.warmup_fraction=0", "optimizer.decay=constant", "training.precision=fp32")
Sizes = dict[str, tuple[float, float]]
"""By name of a value its root mean square at first, and that of its change."""


def main() -> None:
    parser = _common.arguments(__doc__)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    parser.add_argument("--kinds", default=LETTERS, help=f"letters of model.pattern (default {LETTERS})")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables = {}
    for letter in options.kinds:
        with_, without = (
            {width: mean_sizes(options, letter, width, base) for width in options.widths}
            for base in (options.widths[0], None)
        )
        tables[f"{layers.kind_of(letter).name} layers"] = rows(with_, without)
    _common.show({"machine": _common.machine("megatron-core"), "tables": tables}, options.json)


def mean_sizes(options: Any, letter: str, width: int, base: int | None) -> Sizes:
    """Return the sizes of the values in models of some width."""
    settings = [[*options.config, f"training.seed={seed}"] for seed in options.seeds]
    found = [sizes(each, letter, width, base, options.steps) for each in settings]
    pairs = {name: zip(*(each[name] for each in found), strict=True) for name in found[0]}
    return {name: tuple(sum(each) / len(found) for each in pair) for name, pair in pairs.items()}  # type: ignore[misc]


def sizes(config: list[str], letter: str, width: int, base: int | None, steps: int) -> Sizes:
    """Return the sizes of the values in one model."""
    inner = [f"model.{name}={2 * width}" for name in ("expert_hidden_size", "mlp_hidden_size")]
    shape = [
        f'model.pattern="{letter * 2}"',
        f"model.hidden_size={width}",
        *inner,
        f"model.mup.base_width={base or 'null'}",
    ]
    with a_run(config, *FIXED, *shape) as (run, here, start):
        trainer = start(name=f"width_{width}")
        gradients, update = on_random_tokens(run, here, trainer.trainable, LENGTH, SEQUENCES)
        first = values(run, trainer)
        for _ in range(steps):
            gradients()
            trainer.schedule.set(0)
            update()
        last = values(run, trainer)
    return {name: (_size(value), _size(last[name] - value)) for name, value in first.items()}


@torch.no_grad()
def values(run: RunConfig, trainer: Any) -> dict[str, Tensor]:
    """Return products with the matrices of the last layer, what it adds to the stream, and the logits."""
    model, kept = trainer.trainable.model, {}
    block = model.decoder.layers[-1]
    kind = layers.kind_of(run.model.pattern[-1])
    narrower = run.model.mup.model_copy(update={"base_width": run.model.hidden_size // 2})
    readouts = mup.readouts(kind, run.model.model_copy(update={"mup": narrower}))

    def keep(name: str, readout: Sequence[slice]) -> Any:
        def hook(module: Any, inputs: tuple, _: Any) -> None:
            product = F.linear(inputs[0], module.weight)
            grow = torch.ones(product.shape[-1], dtype=torch.bool)
            for rows in readout:
                grow[rows] = False
            if not grow.all():
                kept[f"{name} (rows that do not grow)"] = product[..., ~grow]
            if grow.any():
                kept[name if grow.all() else f"{name} (the others)"] = product[..., grow]

        return hook

    hooks = [
        module.register_forward_hook(keep(name, readouts.get(f"{name}.weight", ())))
        for name, module in block.mixer.named_modules()
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 2
        if f"{name}.weight" not in kind.writes_to_residual
    ]

    def keep_output(_: Any, __: tuple, output: Any) -> None:
        kept["output"] = output[0] if isinstance(output, tuple) else output

    hooks.append(block.mixer.register_forward_hook(keep_output))
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.model.vocab_size, (SEQUENCES, LENGTH), generator=random)
    kept["logits"] = model.eval()(tokens)
    model.train()
    for hook in hooks:
        hook.remove()
    logits = kept.pop("logits")
    return {name: value.clone() for name, value in kept.items()} | {"logits": logits}


def rows(with_: dict[int, Sizes], without: dict[int, Sizes]) -> list[dict[str, Any]]:
    """Return a row for each value: four exponents, and the changes with width transfer."""
    found = []
    for name in next(iter(with_.values())):
        row: dict[str, Any] = {"value": name}
        for title, of_width in (("µP", with_), ("without", without)):
            for place, when in enumerate(("at first", "change")):
                row[f"{title}: {when}"] = f"{exponent({w: s[name][place] for w, s in of_width.items()}):+.2f}"
        row["µP: change at each width"] = " ".join(f"{sizes[name][1]:.2g}" for sizes in with_.values())
        found.append(row)
    return found


def exponent(of_width: dict[int, float]) -> float:
    """Return the slope of log(size) over log(width); least squares."""
    points = [(math.log(width), math.log(max(size, 1e-30))) for width, size in of_width.items()]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def _size(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt())


if __name__ == "__main__":
    main()
