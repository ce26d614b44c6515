"""Open any kind of model folder, recognised by its files."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.formats.run_folder import near
from megatron_blackmamba.interchange import hf, megatron, native, zyphra
from megatron_blackmamba.interchange.canonical import Canonical, Entry, InterchangeError
from megatron_blackmamba.interchange.hub import local_folder
from megatron_blackmamba.interchange.json_config import ends_in, read_json

if TYPE_CHECKING:
    from megatron_blackmamba.model import LanguageModel


def open_model(path: Path, tokenizer: Path | None = None, *, verify: bool = False, ema: bool = False) -> Canonical:
    """Open one of our checkpoints (or a run's newest one), a Hugging Face model, or the released files.

    A name on the Hugging Face hub means its newest download.

    verify: read all of a checkpoint first, and refuse one that is damaged.
    ema: open the averaged weights of a checkpoint (training.ema).
    """
    path = existing_folder(path)
    model = _open(path, verify, ema)
    return model if tokenizer is None else replace(model, tokenizer=tokenizer)


def open_export(path: Path) -> Canonical:
    """Open a Hugging Face model: our export, or one of another family."""
    path = local_folder(path)
    return native.read(path) if native.is_native(path) else hf.read(path)


def config_of_export(path: Path) -> ModelConfig:
    """Return the config of a Hugging Face model, of which only config.json needs to be there."""
    path = local_folder(path)
    return (
        native.read_config(path / "config.json")[1]
        if native.is_native(path)
        else hf.read_config(path / "config.json")[0]
    )


def chat_template(path: Path) -> Path | None:
    """Return the file of a Hugging Face model that has its chat template, if any."""
    config = path / "tokenizer_config.json"
    found = config if config.is_file() and read_json(config).get("chat_template") else path / "chat_template.jinja"
    return found if found.is_file() else None


def ends_of(path: Path) -> set[int]:
    """Return the ids that end a text according to a Hugging Face model's files."""
    files = (path / "config.json", path / "generation_config.json")
    return {end for file in files if file.is_file() for end in ends_in(file) if isinstance(end, int)}


def weights_of(path: Path) -> tuple[ModelConfig, dict[str, Entry]]:
    """Return a model's config, and its weights under the names of `LanguageModel.state_dict`, not yet loaded.

    A checkpoint is verified first, and may hold what only training uses: untied embeddings and float64 weights.
    """
    path = existing_folder(path)
    if (path / zyphra.CONFIG).is_file():
        model = _open(path, verify=True)
        return model.config, megatron.stacked(model)
    reader = CheckpointReader(path)
    reader.verify()
    return reader.config.model, megatron.stored(reader)


@torch.no_grad()
def copy_into(model: "LanguageModel", entries: dict[str, Entry], source: Path | str) -> None:
    """Overwrite the weights of a model that is whole in this process, rounding to its precision where that differs."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    for name, tensor in own.items():
        if name not in entries or entries[name].shape != tuple(tensor.shape):
            raise InterchangeError(f"{source}: has no {name} of the shape {tuple(tensor.shape)}, which the model needs")
    for name, tensor in own.items():
        tensor.copy_(entries[name].load())


def existing_folder(path: Path) -> Path:
    """Return the folder of a model, or of the newest download of a name on the hub; refuse what is no folder."""
    path = local_folder(path)
    if not path.is_dir():
        what = "a file, and a model is a folder" if path.exists() else "no such folder"
        raise InterchangeError(
            f"{path}: {what}{near(path)} Name a run (runs/NAME), one of its checkpoints, or an export"
        )
    return path


def _open(path: Path, verify: bool, ema: bool = False) -> Canonical:
    if (path / zyphra.CONFIG).is_file():
        if ema:
            raise InterchangeError(f"{path}: an export, and --ema reads checkpoints. Name a run, or leave out --ema")
        if native.is_native(path):
            return native.read(path)
        released = "model_type" not in read_json(path / zyphra.CONFIG)
        return zyphra.read(path) if released else hf.read(path)
    return megatron.read(path, verify=verify, ema=ema)
