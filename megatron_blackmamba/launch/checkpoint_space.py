"""Judge whether the disk holds the checkpoints of a run."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.launch.findings import Finding
from megatron_blackmamba.launch.thresholds import Thresholds
from megatron_blackmamba.plan.storage import checkpoint_bytes

GIB = 2**30


def judge(folder: Path, config: RunConfig, thresholds: Thresholds) -> Iterator[Finding]:
    """Compare free space with the checkpoints that must fit; what the run has saved already counts as space.

    One more must fit in any case: a new checkpoint is written before an old one is deleted.
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
