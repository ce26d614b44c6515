"""A module for BLACKMAMBA_IMPORT by which a run is killed after its third step, until the file `dead` is there."""

import os
import signal
from pathlib import Path

from megatron_blackmamba.training.metrics import metric


@metric("dies", title="", format="", due=lambda taken: taken.step == 3 and not Path("dead").exists())
def dies(taken):
    Path("dead").touch()
    os.kill(os.getpid(), signal.SIGKILL)
