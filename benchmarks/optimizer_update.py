"""The update of the weights by Muon beside Adam's, of some layers of a model.

    python -m benchmarks.optimizer_update [CONFIG] [a.b=c ...] [--repeats 3] [--threads 1]

The gradients are random, and the optimizer is the run's own, in one process. Without CONFIG: a Mamba layer and its
experts at the size of blackmamba_1.5b. On CPUs with one thread the clock is CPU time. Vocabulary is left out.
"""

import torch

from benchmarks import _common
from megatron_blackmamba.config import RunConfig, load

FIXED = ("model.vocab_size=1024", "optimizer.clip=0", "parallel.tensor=1", "parallel.expert=1")
DEFAULT = ("blackmamba_1.5b", "model.pattern=ME", "training.precision=fp32")


def main() -> None:
    parser = _common.arguments(__doc__, repeats=3)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    words = options.config or DEFAULT
    files, settings = ([word for word in words if ("=" in word) == keys] for keys in (False, True))
    rows = []
    for kind in ("adamw", "muon"):
        config = load(files, [*settings, *FIXED, f"optimizer.kind={kind}"])
        numbers, seconds = update(config, options.repeats, options.device)
        rows.append(
            {"": kind, "ms": 1e3 * seconds, "times adamw": seconds / (rows[0]["ms"] / 1e3 if rows else seconds)}
        )
    title = f"update of {numbers / 1e6:.0f}M weights, {config.model.pattern}"
    _common.show({"machine": _common.machine("megatron-core"), "tables": {title: rows}}, options.json)


def update(config: RunConfig, repeats: int, device: str) -> tuple[int, float]:
    """Return the number of weights, and the seconds of an update."""
    from megatron_blackmamba.model import build
    from megatron_blackmamba.runtime import world
    from megatron_blackmamba.training.step.optimizer import make_trainable

    here = world.start(config.parallel)
    trainable = make_trainable(config, build(config, here), here)
    for buffer in (*trainable.reduced.buffers, *trainable.reduced.expert_parallel_buffers):
        buffer.grad_data.normal_()
    call = {"": trainable.optimizer.step}
    seconds = _common.median(_common.interleaved(call, repeats=repeats, device=device)[""])
    world.shutdown()
    return sum(weight.numel() for weight in trainable.model.parameters()), seconds


if __name__ == "__main__":
    main()
