"""Reading a checkpoint tensor by tensor: no GPU, no process group, memory for one tensor at a time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.checkpoint import manifest, safety
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.run_folder import RunFolder

STATE = "state.json"
OPTIMIZER = "optimizer."


class CheckpointReader:
    """The weights of a checkpoint under their global names, whatever layout wrote them."""

    def __init__(self, folder: str | Path):
        self.folder = find_checkpoint(folder)
        self.manifest = manifest.read(self.folder)
        safety.refuse_code(self.folder)
        self.state: dict[str, Any] = json.loads((self.folder / STATE).read_bytes())
        self.config = RunConfig.model_validate(self.state["config"])
        self._table = safety.read_table(self.folder).state_dict_metadata

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer the data was made with, if the run had one."""
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None

    def shapes(self) -> dict[str, torch.Size]:
        """Name and whole shape of every weight."""
        return {name: entry.size for name, entry in self._table.items() if not name.startswith(OPTIMIZER)}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Name and precision of every weight."""
        return {name: self._table[name].properties.dtype for name in self.shapes()}

    def tensor(self, name: str) -> Tensor:
        """One whole weight."""
        import torch.distributed.checkpoint as dcp

        entry = self._table.get(name)
        if entry is None:
            raise KeyError(f"{self.folder} has no weight {name!r}")
        whole = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        dcp.load(whole, storage_reader=dcp.FileSystemReader(str(self.folder)), no_dist=True)
        return whole[name]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.shapes():
            yield name, self.tensor(name)

    def verify(self) -> None:
        """Read every byte and compare with the manifest."""
        manifest.verify(self.folder)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint behind a checkpoint's folder, a run's folder (its latest), or a folder of checkpoints."""
    path = Path(path)
    if (path / manifest.NAME).is_file():
        return path
    for run in (RunFolder(path), RunFolder(path.parent)):
        if run.latest.is_file() and path in (run.root, run.checkpoints):
            latest = run.checkpoints / run.latest.read_text().strip()
            if (latest / manifest.NAME).is_file():
                return latest
            raise manifest.DamagedCheckpoint(f"{run.latest} names {latest.name}, which is not a complete checkpoint")
    if not path.exists():
        raise manifest.DamagedCheckpoint(f"{path}: no such file or folder")
    if RunFolder(path).config.is_file():
        raise manifest.DamagedCheckpoint(
            f"{path}: this run has not saved a checkpoint yet (checkpoint.every says when)"
        )
    inside = sorted(run for run in path.glob("*") if RunFolder(run).latest.is_file())
    raise manifest.DamagedCheckpoint(
        f"{path}: not a checkpoint: neither it nor its checkpoints/ has a {manifest.NAME}. "
        + (
            f"Did you mean {inside[0]}?"
            if inside
            else "Name a run folder (runs/NAME) or one of its checkpoints (runs/NAME/checkpoints/step_00001000)."
        )
    )
