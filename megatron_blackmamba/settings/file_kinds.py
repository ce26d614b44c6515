"""Recognise runs, mixtures and studies, to say what a file is that was given in place of another."""

from collections.abc import Mapping
from typing import Any

from megatron_blackmamba.settings.base import ConfigError

RUN_KEYS = {"include", "name", "folder", "model", "data", "training", "optimizer", "parallel", "checkpoint"}


def kind_of(content: Mapping[str, Any]) -> str | None:
    """Return run, mixture or study by the keys of a file, or None if they do not tell."""
    if "variants" in content:
        return "study"
    if "sources" in content:
        return "mixture"
    return "run" if RUN_KEYS & content.keys() else None


def refuse_other_kind(content: Mapping[str, Any], path: object, wanted: str) -> None:
    """Refuse a file of another kind, and say where it belongs."""
    found = kind_of(content)
    if found in (None, wanted):
        return
    if found == "run" and wanted == "mixture":
        data = content.get("data")
        mixture = data.get("mixture") if isinstance(data, Mapping) else None
        advice = f"Its mixture is {mixture}" if mixture else "A mixture lists its `sources`; see docs/mixtures.md"
    elif found == "mixture":
        advice = f"A run reads it: blackmamba train quickstart data.mixture={path}"
    else:
        advice = f"Run it with `blackmamba {'study' if found == 'study' else 'train'} {path}`"
    raise ConfigError(f"{path} is a {found}, not a {wanted}. {advice}")
