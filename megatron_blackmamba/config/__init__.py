"""A run, described: models of every section, YAML files that include each other, and `a.b=c` overrides."""

from megatron_blackmamba.config.load import ConfigError, find, keys, load, shipped
from megatron_blackmamba.config.model import ModelConfig
from megatron_blackmamba.config.run import KernelsConfig, ParallelConfig, RampStage, RunConfig
from megatron_blackmamba.config.saved import from_saved, read_saved, to_saved, to_yaml

__all__ = [
    "ConfigError",
    "KernelsConfig",
    "ModelConfig",
    "ParallelConfig",
    "RampStage",
    "RunConfig",
    "find",
    "from_saved",
    "keys",
    "load",
    "read_saved",
    "shipped",
    "to_saved",
    "to_yaml",
]
