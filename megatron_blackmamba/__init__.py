"""BlackMamba on megatron-core: pretraining of state-space mixture-of-experts models.

The names in `__all__` are the Python API (docs/python.md). Each is imported at its first use, so `import
megatron_blackmamba` stays quick.
"""

TYPE_CHECKING = False  # typing's, whose import takes as long as all that comes before Ctrl-C is handled
if TYPE_CHECKING:
    from megatron_blackmamba.api import (
        batches,
        build,
        evaluate,
        export_hf,
        load_weights,
        save,
        train,
        update_routers,
    )
    from megatron_blackmamba.api import update_routers as update_expert_bias
    from megatron_blackmamba.config import ConfigError, RunConfig
    from megatron_blackmamba.config.load import load as load_config
    from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize
    from megatron_blackmamba.formats.step_records import read_metrics
    from megatron_blackmamba.inference import Sampling, load
    from megatron_blackmamba.ops.causal_conv1d import causal_conv1d
    from megatron_blackmamba.ops.experts import grouped_experts
    from megatron_blackmamba.ops.selective_scan import selective_scan
    from megatron_blackmamba.ops.sinkhorn import load_imbalance, sinkhorn_choice
    from megatron_blackmamba.ops.ssd import ssd
    from megatron_blackmamba.training.loop import Outcome, Trainer

__version__: str

__all__ = [
    "ConfigError",
    "Outcome",
    "RunConfig",
    "Sampling",
    "TokenizeOptions",
    "Trainer",
    "batches",
    "build",
    "causal_conv1d",
    "evaluate",
    "export_hf",
    "grouped_experts",
    "load",
    "load_config",
    "load_imbalance",
    "load_weights",
    "read_metrics",
    "save",
    "selective_scan",
    "sinkhorn_choice",
    "ssd",
    "tokenize",
    "train",
    "update_expert_bias",
    "update_routers",
]
_HOMES = {
    "__version__": "version:__version__",
    "ConfigError": "config:ConfigError",
    "Outcome": "training.loop:Outcome",
    "RunConfig": "config:RunConfig",
    "Sampling": "inference:Sampling",
    "TokenizeOptions": "data_tools.tokenization:TokenizeOptions",
    "Trainer": "training.loop:Trainer",
    "batches": "api:batches",
    "build": "api:build",
    "causal_conv1d": "ops.causal_conv1d:causal_conv1d",
    "evaluate": "api:evaluate",
    "export_hf": "api:export_hf",
    "grouped_experts": "ops.experts:grouped_experts",
    "load": "inference:load",
    "load_config": "config.load:load",
    "load_imbalance": "ops.sinkhorn:load_imbalance",
    "load_weights": "api:load_weights",
    "read_metrics": "formats.step_records:read_metrics",
    "save": "api:save",
    "selective_scan": "ops.selective_scan:selective_scan",
    "sinkhorn_choice": "ops.sinkhorn:sinkhorn_choice",
    "ssd": "ops.ssd:ssd",
    "tokenize": "data_tools.tokenization:tokenize",
    "train": "api:train",
    "update_expert_bias": "api:update_routers",
    "update_routers": "api:update_routers",
}
"""Name -> the module of this package that defines it, and its name there."""


def __getattr__(name: str) -> object:
    """Import a name of the API when it is first used."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    found = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
