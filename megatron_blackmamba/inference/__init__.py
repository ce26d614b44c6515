"""Recurrent decoding: `load` a model of any kind, then `generate`, `stream`, or work with its `Decoder` and `State`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_blackmamba.inference.decoder import Decoder, State
    from megatron_blackmamba.inference.generator import Generator, load
    from megatron_blackmamba.inference.sampling import Sampling

_HOMES = {
    "Decoder": "decoder",
    "State": "decoder",
    "Generator": "generator",
    "load": "generator",
    "Sampling": "sampling",
}


def __getattr__(name: str) -> Any:
    """Import torch only when a name is asked for: the command line imports this package for `--help` too."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
