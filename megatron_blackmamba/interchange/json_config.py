"""The fields that the config.json of the released format and of a Hugging Face export share."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.config.checks import problem_of_model
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.layers import LayerKind, all_kinds, kinds_in, layers_of

MOST_LAYERS, MOST_EXPERTS, LONGEST_ENTRY = 10_000, 2**20, 40
"""Bounds far above any model: a few bytes of a file may describe more names than memory holds."""


def layer_list(config: ModelConfig) -> list[str]:
    """Return the pattern `ME…` as `["r", "8", …]`."""
    entries = [kind.exported(config) for kind in layers_of(config.pattern)]
    return [entry for entry in entries if isinstance(entry, str)]


def model_config(fields: dict[str, Any], content: dict[str, Any], path: Path, names: Mapping[str, str]) -> ModelConfig:
    """Return the ModelConfig; `names` maps field names in the file to ours, for error messages."""
    pattern, of_layers = parse_layers(need(content, "mamba_moe_layers", path), path)
    if content.get("num_layers", len(pattern)) != len(pattern):
        raise InterchangeError(
            f"{path}: num_layers is {content['num_layers']}, mamba_moe_layers has {len(pattern)} entries"
        )
    for kind in kinds_in(pattern):
        try:
            of_layers |= kind.imported_fields(content)
        except (ValueError, TypeError, AttributeError) as error:
            raise InterchangeError(f"{path}: a field of {kind.name} layers cannot be read: {error}") from None
    return validated({**fields, **of_layers, "pattern": pattern}, path, names)


def validated(fields: Mapping[str, Any], path: Path, names: Mapping[str, str]) -> ModelConfig:
    """Return the ModelConfig of these fields; refuse a wrong one by its name in the file."""
    try:
        model = ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "the config"
        theirs = next((theirs for theirs, ours in names.items() if ours == name), name)
        raise InterchangeError(f"{path}: {theirs}: {first['msg']}") from None
    if (experts := sum(kind.routed for kind in layers_of(model.pattern)) * model.experts) > MOST_EXPERTS:
        raise InterchangeError(
            f"{path}: describes {experts:,} experts in all its layers; at most {MOST_EXPERTS:,} convert"
        )
    if problem := problem_of_model(model):
        raise InterchangeError(f"{path}: {problem[1]}")
    return model


def parse_layers(layers: Any, path: Path) -> tuple[str, dict[str, Any]]:
    """Return the pattern that `["r", "8", …]` means, and the config fields that its entries set."""
    if isinstance(layers, list) and layers:
        layer_count(len(layers), "the length of mamba_moe_layers", path)
    else:
        raise InterchangeError(f"{path}: mamba_moe_layers is a list with an entry a layer, not {layers!r}")
    pattern = ""
    fields: dict[str, Any] = {}
    for entry in map(str, layers):
        kind, means = _imported(entry, path)
        pattern += kind.letter
        for field, value in means.items():
            if fields.setdefault(field, value) != value:
                raise InterchangeError(
                    f"{path}: mamba_moe_layers: {field} is {fields[field]} in one layer and {value} in another;"
                    " all layers need the same number"
                )
    return pattern, fields


def _imported(entry: str, path: Path) -> tuple[LayerKind, Mapping[str, Any]]:
    for kind in all_kinds():
        means = kind.imported(entry) if len(entry) < LONGEST_ENTRY else None
        if means is not None:
            return kind, means
    forms = " or ".join(kind.form for kind in all_kinds() if isinstance(kind.entry, str))
    raise InterchangeError(f"{path}: mamba_moe_layers: an entry is {forms}, not {entry[:LONGEST_ENTRY]!r}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InterchangeError(f"{path}: no such file") from None
    except NotADirectoryError:
        raise InterchangeError(f"{path.parent}: a file; name the folder of the model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InterchangeError(f"{path}: not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise InterchangeError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def whole_number(value: Any, name: str, path: Path) -> int:
    """Return a value that is computed with; refuse what is no whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InterchangeError(f"{path}: {name} is {value!r}, not a whole number above 0")
    return value


def trained_length(content: Mapping[str, Any], path: Path) -> int:
    """Return the length that a model was trained with, as the released format and our exports name it."""
    return whole_number(content.get("max_sequence_length", 2048), "max_sequence_length", path)


def layer_count(value: Any, name: str, path: Path) -> int:
    """Return a number of layers; refuse one that no model has before anything is made of it."""
    if type(value) is not int or not 0 < value <= MOST_LAYERS:
        raise InterchangeError(f"{path}: {name} is {value!r}, not a number of layers from 1 to {MOST_LAYERS:,}")
    return value


def ends_in(path: Path) -> list[Any]:
    """Return what a file of transformers names as ends of a text: ids, or None alone."""
    ends = read_json(path).get("eos_token_id")
    return ends if isinstance(ends, list) else [ends]


def need(content: dict[str, Any], field: str, path: Path) -> Any:
    if field not in content:
        raise InterchangeError(f"{path}: has no field {field!r}")
    return content[field]
