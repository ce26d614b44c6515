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
        update_expert_bias,
    )
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
]
_HOMES = {
    "api": "batches build evaluate export_hf load_weights save train update_expert_bias",
    "config": "ConfigError RunConfig",
    "config.load": "load_config=load",
    "data_tools.tokenization": "TokenizeOptions tokenize",
    "formats.step_records": "read_metrics",
    "inference": "Sampling load",
    "ops.causal_conv1d": "causal_conv1d",
    "ops.experts": "grouped_experts",
    "ops.selective_scan": "selective_scan",
    "ops.sinkhorn": "load_imbalance sinkhorn_choice",
    "ops.ssd": "ssd",
    "training.loop": "Outcome Trainer",
    "version": "__version__",
}
"""Module of this package -> the names that it defines; `ours=theirs` where it has another name there."""


def __getattr__(name: str) -> object:
    """Import a name of the API when it is first used."""
    from importlib import import_module

    for module, names in _HOMES.items():
        for ours, _, theirs in (each.partition("=") for each in names.split()):
            if ours == name:
                return globals().setdefault(name, getattr(import_module(f"{__name__}.{module}"), theirs or ours))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
