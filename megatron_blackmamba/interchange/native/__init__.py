"""Models of other families, in and out: folders that transformers and serving engines load without code of ours."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.formats.atomic import write_json, write_text
from megatron_blackmamba.interchange import files, hf, safetensors_io
from megatron_blackmamba.interchange.canonical import (
    Canonical,
    Entry,
    InterchangeError,
    main_depth,
    without_extra_depth,
)
from megatron_blackmamba.interchange.families import FAMILIES
from megatron_blackmamba.interchange.json_config import need, read_json
from megatron_blackmamba.interchange.model_card import model_card
from megatron_blackmamba.interchange.native import state_spaces
from megatron_blackmamba.interchange.native.base import LENGTH, UNBOUNDED, Architecture, positions
from megatron_blackmamba.layers import kinds_in


def _of_family(model_type: str) -> Architecture:
    """Return the architecture that the file named by a model_type defines."""
    module = vars(import_module(f"{__name__}.{model_type}"))
    (found,) = (x for x in module.values() if getattr(x, "model_type", None) == model_type and isinstance(x, type))
    return found()


BY_TYPE = {model_type: _of_family(model_type) for model_type in FAMILIES}
ARCHITECTURES = tuple(BY_TYPE.values())


def nearest(model: ModelConfig) -> tuple[Architecture, list[str]]:
    """Return the architecture with the fewest obstacles, and these; none if the model is one of its."""
    found = [(architecture, architecture.obstacles(model)) for architecture in ARCHITECTURES]
    fits = [pair for pair in found if architecture_has(pair[0], model)]
    return min(fits or found, key=lambda pair: len(pair[1]))


def architecture_has(architecture: Architecture, model: ModelConfig) -> bool:
    """Return whether an architecture has the model's kinds of layers, in their order."""
    return architecture.counted(model.pattern) is not None


def architecture_of(model: ModelConfig, source: str) -> Architecture:
    """Return the architecture of a model; refuse a model without one, with the keys in the way."""
    architecture, obstacles = nearest(model)
    if not obstacles:
        return architecture
    if not architecture_has(architecture, model):
        named = ", ".join(
            f"{each.model_type} ({', '.join(each.obstacles(model)).partition(': ')[2]})" for each in ARCHITECTURES
        )
        raise InterchangeError(
            f"{source}: model.pattern={model.pattern} is in no architecture of transformers: {named}"
        )
    raise InterchangeError(
        f"{source}: not quite a {architecture.model_type} of transformers: {'; '.join(obstacles)}. Set these keys when "
        "the next model is trained. export hf without --native writes any model, with our code"
    )


def described(model: ModelConfig) -> str:
    """Return in a line whether `export hf --native` will take a model, for `plan`."""
    architecture, obstacles = nearest(model)
    if not obstacles:
        return f"{architecture.model_type}, a model of transformers (export hf --native), or with our code"
    if model.mtp.pattern and not nearest(without_extra_depth(model))[1]:
        return f"{described(without_extra_depth(model))}; without its extra depth ({'; '.join(obstacles)})"
    if not architecture_has(architecture, model):
        return "a model with our code: no architecture of transformers has its layers"
    return f"a model with our code; to be a {architecture.model_type} of transformers: {'; '.join(obstacles)}"


def held(model: Canonical) -> Canonical:
    """Return what a native export holds of a model: its extra depth only in a family that has it."""
    return main_depth(model) if nearest(model.config)[1] else model


def is_native(folder: Path) -> bool:
    """Return whether a folder holds a model of another family."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    content = read_json(path)
    return content.get("model_type", hf.MODEL_TYPE) != hf.MODEL_TYPE or state_spaces.is_one(content)


def in_transformers(folder: Path) -> bool:
    """Return whether transformers loads a folder without code; it has no class for the original state-spaces/mamba."""
    return is_native(folder) and not state_spaces.is_one(read_json(folder / "config.json"))


def read(folder: Path) -> Canonical:
    """Read a folder of transformers or of state-spaces/mamba; refuse what does not convert, by key and value."""
    folder = Path(folder)
    hf.refuse_adapter(folder)
    architecture, config, content = read_config(folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    entries = files.read(folder, (files.SAFETENSORS, files.TORCH))
    ahead = [name for name in entries if architecture.extra and architecture.known(name).startswith(architecture.extra)]
    if not ahead:  # transformers keeps the key of an extra depth and drops its weights
        config = without_extra_depth(config)
    unread = () if config.mtp.pattern else tuple(ahead)
    for name in unread:
        del entries[name]
    length = content.get(LENGTH)
    if length == UNBOUNDED and not any(kind.rotates(config) for kind in kinds_in(config.pattern)):
        length = None
    return Canonical(
        config,
        architecture.canonical(config, entries, folder),
        str(folder),
        tokenizer if tokenizer.is_file() else None,
        length if isinstance(length, int) and length > 0 else 2048,
        unread=unread,
    )


def read_config(path: Path) -> tuple[Architecture, ModelConfig, dict[str, Any]]:
    """Return what a config.json describes, and its content."""
    content = read_json(path)
    if state_spaces.is_one(content):
        content = state_spaces.translated(content, path)
    model_type = need(content, "model_type", path)
    if not isinstance(model_type, str) or model_type not in BY_TYPE:
        known = ", ".join((*BY_TYPE, hf.MODEL_TYPE))
        raise InterchangeError(f"{path}: model_type is {model_type!r}; import reads {known}, and state-spaces/mamba")
    architecture = BY_TYPE[model_type]
    return architecture, architecture.imported(content, path), content


def in_file(model: Canonical) -> dict[str, Entry]:
    """Return the tensors under their names in the files."""
    model = held(model)
    return architecture_of(model.config, model.source).in_file(model)


def write(
    model: Canonical,
    folder: Path,
    *,
    shard_bytes: int = hf.SHARD_BYTES,
    write_files: Callable[[safetensors_io.Files], None] = safetensors_io.write_files,
) -> None:
    """Fill `folder` with what `from_pretrained(folder)` needs, without code."""
    architecture = architecture_of(model.config, model.source)
    folder.mkdir(parents=True, exist_ok=True)
    hf.write_weights(architecture.in_file(model), folder, shard_bytes, write_files)
    tokens = hf.write_tokenizer(model, folder)
    config: dict[str, Any] = {"architectures": [architecture.class_name], "model_type": architecture.model_type}
    config |= architecture.exported(model.config) | tokens
    config |= {} if (length := positions(model)) is None else {LENGTH: length}
    config |= {"initializer_range": model.config.init.std, "torch_dtype": str(model.dtype).removeprefix("torch.")}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", tokens)
    write_text(folder / "README.md", model_card(model, architecture.model_type))
