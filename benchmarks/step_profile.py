"""Split the time of a training step by operation.

    python -m benchmarks.step_profile [CONFIG] [a.b=c ...] [--pair MODEL] [--steps 5] [--json]

With --pair, one Mamba and one MoE layer of that model (blackmamba_340m_1.5b) on one sequence of 2,048 tokens, with a
vocabulary too small to count. The update of the weights is apart: at a real batch size it comes once for many
micro-batches. Without a configuration: tiny. Times are each operation's own, without those it calls.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import _common
from benchmarks._trainer import a_run

PAIR = ("model.pattern=ME", "model.vocab_size=512", "data.sequence_length=2048") + (
    "training.global_batch=1",
    "training.micro_batch=1",
)
SMALL = 0.01  # operations with less of the time are one line
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::matmul"),
    "selective scan": ("_Scan", "_ScanBackward"),
    "convolution": ("_Convolution", "_ConvolutionBackward"),
    "copies": ("aten::copy_", "aten::clone", "aten::cat"),
    "waiting for other ranks": ("c10d::", "gloo:"),
}


def main() -> None:
    parser = _common.arguments(__doc__)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    parser.add_argument("--pair", metavar="MODEL", help="one Mamba and one MoE layer of this model")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    words = ["tiny", options.pair, *options.config] if options.pair else options.config
    with a_run(words, *(PAIR if options.pair else ())) as (config, _, start):
        trainer = start(name="step")
        batch = [next(trainer.batches) for _ in range(trainer.step.micro_batches())]
        tables = {
            "gradients": shares(lambda: trainer.step.gradients(iter(batch)), options.steps),
            "update": shares(trainer.step.update, options.steps),
        }
    title = f"{options.pair or config.name}, {config.model.pattern}: {config.tokens_per_step} tokens"
    result = {"machine": _common.machine("megatron-core"), "tables": {f"{n}, {title}": t for n, t in tables.items()}}
    _common.show(result, options.json)


def shares(call: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Own CPU time by kind of operation, the largest first."""
    for _ in range(2):
        call()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            call()
    milliseconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for event in recorded.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), event.key)
        milliseconds[kind] = milliseconds.get(kind, 0.0) + event.self_cpu_time_total / 1e3 / steps
        calls[kind] = calls.get(kind, 0) + event.count // steps
    total = sum(milliseconds.values())
    table = [
        {"": kind, "ms": ms, "share": f"{ms / total:.1%}", "calls": calls[kind]}
        for kind, ms in sorted(milliseconds.items(), key=lambda item: -item[1])
        if ms >= SMALL * total
    ]
    rest = total - sum(row["ms"] for row in table)
    return [*table, {"": "all others", "ms": rest, "share": f"{rest / total:.1%}"}, {"": "together", "ms": total}]


if __name__ == "__main__":
    main()
