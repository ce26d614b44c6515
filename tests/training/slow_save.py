"""A launcher, a worker and a checkpoint writer that never gets done: `python -m tests.training.slow_save FOLDER`."""

import sys
import time
from pathlib import Path

from megatron_blackmamba.formats.run_folder import RunFolder


def launcher(folder: Path) -> int:
    from megatron_blackmamba.training.launcher import launch

    return launch([sys.executable, "-W", "ignore", "-m", __spec__.name, str(folder), "worker"], 1, RunFolder(folder))


def worker(folder: Path) -> None:
    """Begin a save whose writer writes on for ever, and wait for it."""
    from megatron_blackmamba import model
    from megatron_blackmamba.checkpoint import Checkpoints, manifest
    from megatron_blackmamba.config import load
    from megatron_blackmamba.runtime import world
    from megatron_blackmamba.training.step.optimizer import make_trainable

    def write_on(path: Path) -> None:
        while True:
            with open(folder / "written", "ab") as file:
                file.write(b"x")
            time.sleep(0.01)

    manifest.describe = write_on
    config = load("tiny", [f"folder={folder}", "name=run"])
    place = world.start(config.parallel)
    trainable = make_trainable(config, model.build(config, place), place)
    trainable.optimizer.step()
    checkpoints = Checkpoints(RunFolder(folder / "run"), config, place, trainable.model, trainable.optimizer)
    checkpoints.save(1, {})
    checkpoints.finish(wait=True)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    sys.exit(worker(where) if sys.argv[2:] else launcher(where))
