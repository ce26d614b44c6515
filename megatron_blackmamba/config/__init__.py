"""A run, described: models of every section, YAML files that include each other, and `a.b=c` overrides."""

from megatron_blackmamba.config.load import find, keys, load, shipped
from megatron_blackmamba.config.saved import from_saved, model_to_yaml, read_saved, to_saved, to_yaml
from megatron_blackmamba.settings import ConfigError, KernelsConfig, ModelConfig, ParallelConfig, RampStage, RunConfig
