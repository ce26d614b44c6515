"""A run, described: models of every section, YAML files that include each other, and `a.b=c` overrides."""

from megatron_blackmamba.config.load import ConfigError, find, keys, load, shipped, to_yaml
from megatron_blackmamba.config.model import ModelConfig
from megatron_blackmamba.config.run import ParallelConfig, RunConfig

__all__ = ["ConfigError", "ModelConfig", "ParallelConfig", "RunConfig", "find", "keys", "load", "shipped", "to_yaml"]
