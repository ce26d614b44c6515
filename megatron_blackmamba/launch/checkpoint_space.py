"""Judge whether the disk holds the checkpoints of a run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.launch.findings import Finding
from megatron_blackmamba.launch.thresholds import Thresholds
from megatron_blackmamba.plan.storage import checkpoint_bytes, kept_steps

GIB = 2**30


def judge(folder: Path, config: RunConfig, thresholds: Thresholds) -> Iterator[Finding]:
    """Compare free space with the checkpoints that must fit; what the run has saved already counts as space.

    One more must fit in any case: a new checkpoint is written before an old one is deleted. If all that the run keeps
    until its end do not fit, that is a warning.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    size, free = checkpoint_bytes(config), shutil.disk_usage(place).free
    checkpoints = {RunFolder(each).checkpoints for each in (folder, Path(config.folder).resolve() / config.name)}
    saved = sum(file.stat().st_size for each in checkpoints for file in each.glob("step_*/*") if file.is_file())
    needed = max(size, thresholds.checkpoints * size - saved)
    found = f"{free / GIB:.2f} GiB free at {place}; a checkpoint of {config.name} takes {size / GIB:.2f} GiB"
    lacking = max(0.0, needed - free) / GIB
    advice = f"{thresholds.checkpoints:g} checkpoints must fit: free {lacking:.2f} GiB, or use another disk"
    yield Finding.judge("disk", "space", found, free >= needed, advice)
    count = len(kept_steps(config)) + 1
    lacking = (count * size - saved - free) / GIB
    if free >= needed and lacking > 0:
        found = (
            f"{count} checkpoints by the end of {config.name}, {count * size / GIB:.2f} GiB; {lacking:.2f} GiB too many"
        )
        advice = "free that space before the run needs it, or keep fewer: checkpoint.keep_every=0"
        yield Finding("disk", "space for all", found, "warning", advice)
