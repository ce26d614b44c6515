"""A step of the training loop compared with its bare arithmetic, and with other scans.

    python -m benchmarks.train_step [CONFIG] [a.b=c ...] [--nproc 2] [--repeats 20] [--scans] [--json]

- the loop: a step of `blackmamba train`: data, gradients, guard, update, records
- the step: training/step/step.py alone: megatron-core's schedule, gradient reduction, distributed optimizer
- bare: forward, backward, clipping and AdamW by PyTorch, with the same model on the same batch

With several processes, the bare step performs the same all-reduces as any correct step: the gradients, once and in one
piece, and the experts' part of their norm. With --scans, the loop runs in one process with another scan: chunked
PyTorch, mambapy, transformers, if installed. The loop reads new data at every step; the others repeat one batch.
Without CONFIG: tiny. One process is timed by its CPU time, including the threads that read data; several by wall time.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import _common
from benchmarks._trainer import Start, a_run
from benchmarks.selective_scan import peers
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder

LOOP, STEP, BARE = "the loop", "the step", "bare"
Ways = dict[str, Callable[[], Any]]


def main() -> None:
    parser = _common.arguments(__doc__, repeats=20)
    parser.add_argument("config", nargs="*", help="as for blackmamba train")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--scans", action="store_true", help="also the loop with other scans")
    options = parser.parse_args()
    if options.nproc > 1 and "RANK" not in os.environ:
        raise SystemExit(_start_workers(options.nproc))
    if options.nproc > 1 and options.scans:
        parser.error("--scans is for one process")
    torch.set_num_threads(options.threads)
    result = measure(options)
    if os.environ.get("RANK", "0") == "0":
        _common.show(result, options.json)


def measure(options: Any) -> dict[str, Any]:
    with a_run(options.config) as (config, here, start):
        ways = against_bare_arithmetic(config, here, start)
        if options.scans:
            ways |= with_other_scans(start)
        alone = options.nproc == 1
        clock = options.device if alone else "the wall"
        seconds = _common.interleaved(
            ways, repeats=options.repeats, device=clock, patience=30.0 if alone else float("inf")
        )
    bare, loop = (_common.median(seconds[name]) for name in (BARE, LOOP))
    table = [
        {
            "": name,
            "ms": 1e3 * _common.median(runs),
            "times bare": _common.median(runs) / bare,
            "times the loop": _common.median(runs) / loop,
            "runs": len(runs),
        }
        for name, runs in seconds.items()
    ]
    title = f"a step of {config.name}: {config.tokens_per_step} tokens, {config.training.precision}"
    return {
        "machine": _common.machine("megatron-core", "mambapy", "transformers"),
        "tables": {f"{title}, {here.size} process(es)": table},
    }


def against_bare_arithmetic(config: RunConfig, here: Any, start: Start) -> Ways:
    """The loop, its step, and what PyTorch alone needs for the same model and batch."""
    trainer, other = start(name="loop"), start(name="step")
    batch = [next(other.batches) for _ in range(other.step.micro_batches())]

    def step() -> None:
        other.step.gradients(iter(batch))
        other.step.update()

    return {LOOP: partial(step_of_loop, trainer), STEP: step, BARE: bare_step(config, here, batch)}


def with_other_scans(start: Start) -> Ways:
    """The loop with another scan in every Mamba layer."""
    from megatron_blackmamba.model import mamba

    ways: Ways = {"the loop, chunked scan": partial(step_of_loop, start(name="chunked", scan="chunked"))}
    for name, scan in peers("float32").items():

        def call(trainer: Any, scan: Callable) -> None:
            with mock.patch.object(mamba, "selective_scan", partial(peer_scan, scan)):
                step_of_loop(trainer)

        ways[f"the loop, {name}'s scan"] = partial(call, start(name=name), scan)
    return ways


def peer_scan(scan: Callable, u, delta, A, B, C, D, *, z_BLI, delta_bias_I, **ignored):
    """Our scan's signature, a peer's scan."""
    return scan({"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z_BLI, "delta_bias": delta_bias_I})


def step_of_loop(trainer: Any) -> None:
    """Take one step as Trainer.run does."""
    trainer.take_step()
    trainer.keeper.after_step(trainer.progress.step)


def bare_step(config: RunConfig, here: Any, batch: list[dict]) -> Callable[[], None]:
    """Return PyTorch's own training step on the same model and batch."""
    from megatron_blackmamba import model as modelling

    model = modelling.build(config, here).train()
    parameters = list(model.parameters())
    is_expert = [not getattr(parameter, "allreduce", True) for parameter in parameters]
    dense = [parameter for parameter, expert in zip(parameters, is_expert, strict=True) if not expert]
    experts = [parameter for parameter, expert in zip(parameters, is_expert, strict=True) if expert]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        lr=1e-5,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def step() -> None:
        optimizer.zero_grad()
        for micro_batch in batch:
            losses = model(micro_batch["tokens"], micro_batch["labels"])
            (losses.mean() / (len(batch) * here.data_size)).backward()
        add_over_ranks(dense, here.groups.dp)
        add_over_ranks(experts, here.groups.expt_dp)
        squares = norm(dense) ** 2, norm(experts) ** 2
        if here.groups.ep.size() > 1:
            dist.all_reduce(squares[1], group=here.groups.ep)
        torch.nn.utils.clip_grads_with_norm_(parameters, settings.clip, sum(squares).sqrt())
        optimizer.step()

    return step


def add_over_ranks(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        gradients = [parameter.grad for parameter in parameters]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together, group=group)
        parts = together.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def norm(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])


def _start_workers(processes: int) -> int:
    from megatron_blackmamba.training.launcher import launch

    with tempfile.TemporaryDirectory(prefix="train_step_") as folder:
        command = [sys.executable, "-m", "benchmarks.train_step", *sys.argv[1:]]
        return launch(command, processes, RunFolder(Path(folder)))


if __name__ == "__main__":
    main()
