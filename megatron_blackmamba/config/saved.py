"""Read and write saved configs, for checkpoints, run folders and exports."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_blackmamba.config import migrations
from megatron_blackmamba.config.load import explain, known, unknown_key
from megatron_blackmamba.settings import ConfigError, ModelConfig, RunConfig
from megatron_blackmamba.settings.yaml_files import read_yaml
from megatron_blackmamba.version import __version__


def to_saved(config: RunConfig) -> dict[str, Any]:
    """Return every key of a run as JSON values, with the version that `from_saved` needs."""
    return {migrations.VERSION_KEY: migrations.current_version(), **config.model_dump(mode="json", by_alias=True)}


def to_yaml(config: RunConfig) -> str:
    """Return the run as YAML that `load` and `read_saved` read back to the same run, also in later versions."""
    return yaml.safe_dump(to_saved(config), sort_keys=False, allow_unicode=True, width=120)


def model_to_yaml(model: ModelConfig) -> str:
    """Return a file with the `model:` section alone, to name after a run's file."""
    return yaml.safe_dump({"model": model.model_dump(mode="json")}, sort_keys=False, allow_unicode=True, width=120)


def from_saved(content: Any, where: str | Path, known_kinds: bool = True) -> RunConfig:
    """Return the run that a saved config describes, whichever version saved it.

    where: For errors.
    known_kinds: Refuse a run whose kinds of layers, routers and so on are not defined here.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: a saved config is a mapping of sections, not a {type(content).__name__}.")
    migrated = migrations.migrate(content, str(where))
    if unknown := unknown_key(migrated):
        raise ConfigError(
            f"{where}: {unknown!r} is unknown to megatron-blackmamba {__version__}: a newer version saved this config."
            " Upgrade: git pull, then make -B install."
        )
    try:
        run = RunConfig.model_validate(migrated)
    except ValidationError as error:
        raise ConfigError(explain(error, {"": str(where)})) from None
    return known(run, {"": str(where)}) if known_kinds else run


def read_saved(path: Path, known_kinds: bool = True) -> RunConfig:
    """Return the run that a saved `config.yaml` describes; who only reads records needs no known kinds."""
    return from_saved(read_yaml(path), path, known_kinds)
