"""Time of a training step by sequence length: no part should grow faster than linearly.

    python -m benchmarks.step_length [CONFIG] [a.b=c ...] [--lengths 512 2048 16384] [--repeats 5] [--json]
    python -m benchmarks.step_length model.pattern=ME model.hidden_size=1152 model.expert_hidden_size=3072 --repeats 1

- cut: gradients of one micro-batch with the tokens of the longest sequence, cut into sequences of each length
- alone: gradients of one sequence; fixed costs of a step weigh more on short sequences
- update: the optimizer's part, equal for every length

Times are in microseconds per token, and as ratios to the shortest length. Without CONFIG: tiny. CPU time of one
process, after enough warm-up rounds that its memory no longer grows.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import _common
from benchmarks._trainer import a_run, on_random_tokens

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
UPDATE = (0, 0)


def main() -> None:
    parser = _common.arguments(__doc__)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    longest = max(options.lengths)
    one = ("training.global_batch=1", "training.micro_batch=1", f"data.sequence_length={longest}")
    with a_run(options.config, *one) as (config, here, start):
        trainer = start(name="step")
        shapes = dict.fromkeys((length, many) for length in options.lengths for many in (longest // length, 1))
        calls: dict[Any, Callable] = {
            shape: on_random_tokens(config, here, trainer.trainable, *shape)[0] for shape in shapes
        }
        calls[UPDATE] = trainer.step.update
        _common.settle(calls.values())
        seconds = _common.interleaved(
            calls, repeats=options.repeats, device=options.device, patience=float("inf"), uncounted=0
        )
    _common.show(
        {
            "machine": _common.machine("megatron-core"),
            "tables": {f"a step of {config.name}, {config.model.pattern} of {config.model.hidden_size}": rows(seconds)},
            "notes": [f"update: {1e3 * _common.median(seconds[UPDATE]):.1f} ms"],
        },
        options.json,
    )


def rows(seconds: dict[tuple[int, int], list[float]]) -> list[dict[str, Any]]:
    a_token = {shape: 1e6 * _common.median(runs) / max(shape[0] * shape[1], 1) for shape, runs in seconds.items()}
    lengths = sorted({length for length, _ in seconds if length})
    longest = lengths[-1]
    table = []
    for length in lengths:
        row: dict[str, Any] = {"length": f"{length:,}"}
        for name, many in (("cut", lambda length: longest // length), ("alone", lambda length: 1)):
            row[f"{name}, µs a token"] = a_token[length, many(length)]
            row[f"{name}, times the shortest"] = a_token[length, many(length)] / a_token[lengths[0], many(lengths[0])]
        table.append(row)
    return table


if __name__ == "__main__":
    main()
