"""Reading a checkpoint tensor by tensor: no GPU, no process group, memory for one tensor at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.checkpoint import manifest, safety
from megatron_blackmamba.config import ConfigError, RunConfig, from_saved
from megatron_blackmamba.formats.run_folder import RunFolder

STATE = "state.json"
OPTIMIZER = "optimizer."
AVERAGED = "optimizer.state.ema."
"""Before the name of a weight: its moving average (training.ema)."""


class CheckpointReader:
    """The weights of a checkpoint under their global names, whatever layout wrote them."""

    def __init__(self, folder: str | Path, ema: bool = False):
        """Open a checkpoint, or a run's newest one; `ema` reads the averaged weights instead (training.ema)."""
        self.folder = find_checkpoint(folder)
        self.manifest = manifest.read(self.folder)
        manifest.check_sizes(self.folder, self.manifest["files"])
        safety.refuse_code(self.folder, self.manifest["files"])
        self.state = read_state(self.folder)
        self.config = saved_config(self.folder, self.state)
        self._table = safety.read_table(self.folder).state_dict_metadata
        averages = {name.removeprefix(AVERAGED): name for name in self._table if name.startswith(AVERAGED)}
        if ema and not averages:
            raise manifest.CheckpointError(
                f"{self.folder}: has no averaged weights: its run has training.ema=0. Leave out --ema, or train with"
                " training.ema=0.999 for example."
            )
        self._stored = averages if ema else {}
        """The names of tensors that stand in for weights. Expert biases are no weights, and have no average."""

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def tokenizer(self) -> Path | None:
        """Return the tokenizer of the data, if the run had one."""
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None

    @property
    def eod_id(self) -> int | None:
        """Return the end-of-document id of the data; None if an older version saved the checkpoint."""
        return eod_id(self.state)

    def shapes(self) -> dict[str, torch.Size]:
        """Name and whole shape of every weight."""
        return {name: entry.size for name, entry in self._table.items() if not name.startswith(OPTIMIZER)}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Name and precision of every weight."""
        return {name: self._entry(name).properties.dtype for name in self.shapes()}

    def tensor(self, name: str) -> Tensor:
        """Return one unsharded weight. Where it cannot be read, name the file that is damaged."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        if name not in self._table:
            raise KeyError(f"{self.folder} has no weight {name!r}")
        entry, stored = self._entry(name), self._stored.get(name, name)
        whole = {stored: torch.empty(entry.size, dtype=entry.properties.dtype)}
        try:
            dcp.load(whole, storage_reader=dcp.FileSystemReader(str(self.folder)), no_dist=True)
        except CheckpointException:
            self.verify()
            raise
        return whole[stored]

    def _entry(self, name: str) -> Any:
        return self._table[self._stored.get(name, name)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.shapes():
            yield name, self.tensor(name)

    def verify(self) -> None:
        """Read every byte and compare with the manifest."""
        manifest.verify(self.folder)


def read_state(folder: Path, parts: Sequence[str] = ("config",)) -> dict[str, Any]:
    """Return what a checkpoint holds beside its tensors. Raise CheckpointError unless it has these parts."""
    path = folder / STATE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise manifest.DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise manifest.unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise manifest.CheckpointError(f"{path}: refused: not JSON: {error}") from None
    lacks = [part for part in parts if not isinstance(state, dict) or not isinstance(state.get(part), dict)]
    if lacks:
        raise manifest.CheckpointError(f"{path}: refused: it has no {lacks[0]}")
    return state


def eod_id(state: Mapping[str, Any]) -> int | None:
    """Return the end-of-document id of the data that a checkpoint's state describes, if it tells."""
    return ((state.get("data") or {}).get("tokenizer") or {}).get("eod_id")


def saved_config(folder: Path, state: dict[str, Any]) -> RunConfig:
    """Return the run config in `read_state`, from any saved version; raise CheckpointError if it is invalid."""
    try:
        return from_saved(state["config"], folder / STATE)
    except ConfigError as error:
        raise manifest.CheckpointError(str(error)) from None


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint at a path: a checkpoint, a run folder (its latest) or a folder of checkpoints."""
    path = Path(path)
    if (path / manifest.NAME).is_file():
        return path
    for run in (RunFolder(path), RunFolder(path.parent)):
        if run.latest.is_file() and path in (run.root, run.checkpoints):
            return _latest(run)
    if not path.exists():
        raise manifest.DamagedCheckpoint(f"{path}: no such file or folder")
    if RunFolder(path).done.is_file():
        raise manifest.DamagedCheckpoint(f"{path}: this run is complete, but its checkpoints were removed")
    if RunFolder(path).config.is_file():
        raise manifest.DamagedCheckpoint(
            f"{path}: this run has not saved a checkpoint yet (checkpoint.every says when)"
        )
    if (form := _exported_form(path)) is not None:
        raise manifest.DamagedCheckpoint(
            f"{path}: an export, not a checkpoint. Convert it with `blackmamba import {form} {path} checkpoints/NAME`,"
            " and name that folder."
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


def _exported_form(path: Path) -> str | None:
    """Return which `blackmamba import` reads the folder: hf or zyphra. None if it is no export."""
    try:
        content = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or "mamba_moe_layers" not in content:
        return None
    return "hf" if "model_type" in content else "zyphra"


def _latest(run: RunFolder) -> Path:
    """Return the checkpoint that `latest` names, which must lie beside it."""
    try:
        name = run.latest.read_bytes()[:256].decode().strip()
    except OSError as error:
        raise manifest.unreadable(run.latest, error) from None
    except UnicodeDecodeError:
        name = ""
    if not manifest.STEP.fullmatch(name):
        raise manifest.DamagedCheckpoint(
            f"{run.latest}: does not name a checkpoint. Write the name of the newest one into it, such as step_00001000"
        )
    if not (run.checkpoints / name / manifest.NAME).is_file():
        raise manifest.DamagedCheckpoint(f"{run.latest} names {name}, which is not a complete checkpoint")
    return run.checkpoints / name
