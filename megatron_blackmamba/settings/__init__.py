"""The sections of a run's config: keys, defaults and bounds. Kinds read them; `config` loads and checks them."""

from megatron_blackmamba.settings.base import ConfigError, Section, UserPath
from megatron_blackmamba.settings.model import (
    AttentionConfig,
    DeltaConfig,
    Mamba2Config,
    Mamba3Config,
    ModelConfig,
    RouterConfig,
)
from megatron_blackmamba.settings.optimizer import GroupConfig, GroupsConfig, OptimizerConfig
from megatron_blackmamba.settings.run import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GuardConfig,
    KernelsConfig,
    ParallelConfig,
    RampStage,
    RunConfig,
    SyntheticConfig,
)
