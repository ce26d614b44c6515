"""A trainer to measure: of a temporary run, saying nothing, saving nothing."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_blackmamba.config import RunConfig, load

OFF = ("checkpoint.every=0", "training.evaluate_every=0", "logging.tensorboard=false")
Start = Callable[..., Any]
"""start(name=…, scan=…): another trainer of the same run."""


@contextlib.contextmanager
def a_run(words: list[str], *overrides: str) -> Iterator[tuple[RunConfig, Any, Start]]:
    """The run that `words` describe as for blackmamba train (tiny if none do), its place in the world, its trainers."""
    from megatron_blackmamba.runtime import world
    from megatron_blackmamba.runtime.signals import StopRequest
    from megatron_blackmamba.runtime.watchdog import Watchdog

    warnings.filterwarnings("ignore")
    files = [word for word in words if "=" not in word] or ["tiny"]
    settings = [word for word in words if "=" in word]
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder, Watchdog(3600) as watchdog:
        config = load(files, [*settings, *overrides, *OFF, f"folder={folder}"])
        here = world.start(config.parallel)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield config, here, partial(_start, config, here, StopRequest(()), watchdog)
        world.shutdown()


def _start(config: RunConfig, here: Any, stop: Any, watchdog: Any, name: str, scan: str | None = None) -> Any:
    from megatron_blackmamba.training.loop import Trainer

    kernels = config.kernels.model_copy(update={"scan": scan or config.kernels.scan})
    trainer = Trainer(config.model_copy(update={"kernels": kernels, "name": name}), here, stop, watchdog)
    trainer.begin()
    return trainer


def on_random_tokens(
    config: RunConfig, here: Any, trainable: Any, length: int, sequences: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions for the gradients and the update of a step on one micro-batch of random tokens."""
    gradients, step = step_on_random_tokens(config, here, trainable, length, sequences)
    return gradients, step.update


def step_on_random_tokens(
    config: RunConfig, here: Any, trainable: Any, length: int, sequences: int, tell: Callable[[str], None] = print
) -> tuple[Callable[[], Any], Any]:
    """Return a function for the gradients of a step on one micro-batch of random tokens, and the `Step`.

    tell: told whether micro-batches are CUDA graphs.
    """
    from megatron_blackmamba.runtime.device import device
    from megatron_blackmamba.training.step.step import Step

    data = config.data.model_copy(update={"sequence_length": length})
    training = config.training.model_copy(update={"global_batch": sequences, "micro_batch": sequences})
    step = Step(config.model_copy(update={"data": data, "training": training}), here, trainable, 1, tell)
    seeded = torch.Generator().manual_seed(length)
    text = torch.randint(config.model.vocab_size, (sequences, length + 1), generator=seeded).to(device())
    batch = {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(sequences, length, device=text.device),
        "source_ids": torch.zeros(sequences, dtype=torch.int64, device=text.device),
        "sample_ids": torch.arange(sequences),
    }
    return lambda: step.gradients(iter([batch])), step
