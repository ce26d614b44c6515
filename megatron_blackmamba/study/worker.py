"""`python -m megatron_blackmamba.study.worker CONFIG...`: train one run after another in one process.

A small run takes less time than starting Python does. A stopped run ends the process with its exit code.
"""

import sys

from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.runtime.exits import STOPPED_ON_REQUEST
from megatron_blackmamba.runtime.signals import StopRequest
from megatron_blackmamba.study.runs import folder_of
from megatron_blackmamba.training.loop import train


def main(paths: list[str]) -> int:
    """Train the runs of config files in order; return 0, or the exit code of the first that did not end as planned."""
    request = StopRequest()
    try:
        for config in (load([path]) for path in paths):
            if request.asked:  # as the run before ended
                return int(STOPPED_ON_REQUEST)
            if not _past(config) and (code := train(config)):
                return int(code)
    finally:
        request.release()
    return 0


def _past(config: RunConfig) -> bool:
    """Return whether a run has the checkpoint at which it is to stop."""
    folder, step = folder_of(config), config.training.stop_after_steps
    return folder.done.exists() or (step is not None and folder.checkpoint(step).is_dir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
