"""What the config.json of the released format and of a Hugging Face export have in common."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import InterchangeError


def layer_list(config: ModelConfig) -> list[str]:
    """The pattern `ME…` as `["r", "8", …]`."""
    return ["r" if letter == "M" else str(config.experts) for letter in config.pattern]


def model_config(fields: dict[str, Any], content: dict[str, Any], path: Path, names: Mapping[str, str]) -> ModelConfig:
    """ModelConfig from its own fields and the list of layers. `names`: their name of a field → ours, for messages."""
    pattern, experts = parse_layers(need(content, "mamba_moe_layers", path), path)
    if content.get("num_layers", len(pattern)) != len(pattern):
        raise InterchangeError(
            f"{path}: num_layers is {content['num_layers']}, mamba_moe_layers has {len(pattern)} entries"
        )
    try:
        return ModelConfig.model_validate({**fields, "pattern": pattern, "experts": experts})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the config"
        theirs = next((theirs for theirs, ours in names.items() if ours == name), name)
        raise InterchangeError(f"{path}: {theirs}: {first['msg']}") from None


def parse_layers(layers: Any, path: Path) -> tuple[str, int]:
    """`["r", "8", …]` to the pattern `ME…` and the number of experts, which is one for the whole model here."""
    if not isinstance(layers, list) or not layers:
        raise InterchangeError(f"{path}: mamba_moe_layers is a list with an entry a layer, not {layers!r}")
    kinds = [str(kind) for kind in layers]
    wrong = next((kind for kind in kinds if kind != "r" and not (kind.isdecimal() and int(kind) > 0)), None)
    if wrong is not None:
        raise InterchangeError(f'{path}: mamba_moe_layers: an entry is "r" or a number of experts, not {wrong!r}')
    counts = sorted({int(kind) for kind in kinds if kind != "r"})
    if len(counts) > 1:
        raise InterchangeError(f"{path}: mamba_moe_layers has layers of {counts} experts; all need the same number")
    return "".join("M" if kind == "r" else "E" for kind in kinds), counts[0] if counts else 1


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InterchangeError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InterchangeError(f"{path}: not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise InterchangeError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def need(content: dict[str, Any], field: str, path: Path) -> Any:
    if field not in content:
        raise InterchangeError(f"{path}: has no field {field!r}")
    return content[field]
