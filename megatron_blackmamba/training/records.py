"""The files that say what a run is: written at its start, and again if a clean-up of old files removes them."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.training.lock import Lock


class Records:
    """Small files of a run folder with their contents, and its lock."""

    def __init__(self, lock: Lock, contents: Mapping[Path, bytes]) -> None:
        self.lock, self.contents = lock, contents

    def write(self) -> None:
        """Write all files, over those of an earlier start."""
        for path, content in self.contents.items():
            atomic.write_bytes(path, content)

    def restore(self) -> str:
        """Write again what was removed. Return a line about it, empty if nothing was.

        Raises RunInUse if another job has taken the folder since the lock was removed.
        """
        names = []
        with contextlib.suppress(OSError):  # a full disk: the next save tries again
            if self.lock.restore():
                names.append(self.lock.path.name)
            for path, content in self.contents.items():
                if not path.exists():
                    atomic.write_bytes(path, content)
                    names.append(path.name)
        return f"{self.lock.path.parent}: {', '.join(names)} had been removed and is written again" if names else ""
