"""A trainer to measure: of a temporary run, saying nothing, saving nothing."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_blackmamba.config import RunConfig, load

OFF = ("checkpoint.every=0", "training.evaluate_every=0", "logging.tensorboard=false")
Start = Callable[..., Any]
"""start(name=…, scan=…): another trainer of the same run."""


@contextlib.contextmanager
def a_run(words: list[str], *overrides: str) -> Iterator[tuple[RunConfig, Any, Start]]:
    """The run that `words` describe as for blackmamba train (tiny if none do), its place in the world, its trainers."""
    from megatron_blackmamba.runtime import world
    from megatron_blackmamba.runtime.signals import StopRequest, Watchdog

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

    model = config.model.model_copy(update={"scan": scan or config.model.scan})
    trainer = Trainer(config.model_copy(update={"model": model, "name": name}), here, stop, watchdog)
    trainer.begin()
    return trainer
