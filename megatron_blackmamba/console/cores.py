"""The processor cores that commands divide among their workers."""

import os


def usable_cores() -> int:
    """Return the number of cores this process may use: Slurm or a container may leave it a part of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
