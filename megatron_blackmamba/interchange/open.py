"""Open any of the three kinds of model folder, recognised by its files."""

from dataclasses import replace
from pathlib import Path

from megatron_blackmamba.interchange import hf, megatron, zyphra
from megatron_blackmamba.interchange.canonical import Canonical, InterchangeError
from megatron_blackmamba.interchange.hub import local_folder
from megatron_blackmamba.interchange.json_config import read_json


def open_model(path: Path, tokenizer: Path | None = None, *, verify: bool = False) -> Canonical:
    """Open one of our checkpoints (or a run's newest one), a Hugging Face export, or the released files.

    A name on the Hugging Face hub means its newest download.

    verify: read all of a checkpoint first, and refuse one that is damaged.
    """
    path = existing_folder(path)
    model = _open(path, verify)
    return model if tokenizer is None else replace(model, tokenizer=tokenizer)


def existing_folder(path: Path) -> Path:
    """Return the folder of a model, or of the newest download of a name on the hub; refuse what is no folder."""
    path = local_folder(path)
    if not path.is_dir():
        what = "a file, and a model is a folder" if path.exists() else "no such folder"
        raise InterchangeError(f"{path}: {what}. Name a run (runs/NAME), one of its checkpoints, or an export")
    return path


def _open(path: Path, verify: bool) -> Canonical:
    if (path / zyphra.CONFIG).is_file():
        released = "model_type" not in read_json(path / zyphra.CONFIG)
        return zyphra.read(path) if released else hf.read(path)
    return megatron.read(path, verify=verify)
