"""The files that say what a run is: written at its start, and again if a clean-up of old files removes them."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from megatron_blackmamba.config import RunConfig, to_yaml
from megatron_blackmamba.data import DataPlan
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.mixture import Mixture
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.registry import extensions
from megatron_blackmamba.training.keep.lock import Lock


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


def contents(folder: RunFolder, config: RunConfig, data: DataPlan, mixture: Mixture | None = None) -> dict[Path, bytes]:
    """Return what the folder says of a run: its config, its data and their tokenizer."""
    used = ",".join(extensions())
    needs = f"# trained with BLACKMAMBA_IMPORT={used}\n" if used else ""
    found = {
        folder.config: (needs + to_yaml(config)).encode(),
        folder.data_plan: atomic.json_bytes(data.describe()),
    }
    if mixture:
        found[folder.mixture] = mixture.to_yaml().encode()
    tokenizer = data.record["tokenizer"]
    if tokenizer and tokenizer["file"]:
        found[folder.tokenizer] = Path(tokenizer["file"]).read_bytes()
    return found
