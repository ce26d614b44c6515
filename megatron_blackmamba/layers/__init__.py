"""Layer kinds: one folder per letter of `model.pattern`, with everything that the rest of the project asks about it.

A folder in this package whose `kind.py` defines a LayerKind is found by itself; `register` adds one from elsewhere.
"""

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megatron_blackmamba import norms
from megatron_blackmamba.costs import Sizes, Work
from megatron_blackmamba.layers.base import Division, LayerKind
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.decoding import Decoding, Inputs
from megatron_blackmamba.layers.rows import Stack, Weight, by_columns, by_rows, whole
from megatron_blackmamba.registry import Cannot, Registry

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig

MTP = "extra_depth"
"""The name of the module of model.mtp. A module named mtp would have to be megatron-core's."""
SCALINGS = ("stream.scale", "stream.bias", "output.scale", "output.bias")
"""Parameters of a layer with model.residual_scaling."""
_MIXER = re.compile(rf"(?P<stack>decoder|{MTP})\.layers\.(?P<layer>\d+)\.mixer\.(?P<name>.+)")
_KINDS = Registry(LayerKind, "model.pattern", name="letter")  # type: ignore[type-abstract]
_KINDS.discover(__name__, __path__)
register, unregister, all_kinds, kind_of = _KINDS.register, _KINDS.unregister, _KINDS.all_kinds, _KINDS.kind_of
check_keys = _KINDS.check_keys


def layers_of(pattern: str) -> Iterator[LayerKind]:
    """Yield the kind of each layer."""
    return map(kind_of, pattern)


def kinds_in(pattern: str) -> tuple[LayerKind, ...]:
    """Return the kinds that a pattern uses, each once, in the order of their first layer."""
    return tuple(map(kind_of, dict.fromkeys(pattern)))


def routes(pattern: str) -> bool:
    """Return whether some layer sends tokens to experts."""
    return any(kind.routed for kind in kinds_in(pattern))


def carried(model: "ModelConfig") -> int:
    """Return how many numbers a token takes from layer to layer beside the residual stream."""
    return max(kind.carried(model) for kind in kinds_in(model.pattern))


def around_mixer(model: "ModelConfig", layer: int) -> list[str]:
    """Return the names of a layer's parameters outside its mixer, each of the model's width."""
    return ["norm.weight"] * model.has_norm(layer) + [*SCALINGS] * model.residual_scaling


def unread_keys(pattern: str) -> dict[str, str]:
    """Return the keys and sections of `model:` that no layer of a pattern reads, and the kinds that read them."""
    read = {key for kind in kinds_in(pattern) for key in kind.keys}
    return {
        key: f"{' or '.join(kind.name for kind in readers)} layers ({', '.join(kind.letter for kind in readers)})"
        for key, readers in _KINDS.readers().items()
        if key not in read
    }


SWITCHES = (
    *("attention.qk_norm", "mamba_norms", "router.z_loss", "multipliers.attention", "mup.base_heads"),
    "latent_size",
)
"""Keys of `model:` that add something to layers. Adding it to layers that a model does not have is an error."""


def unread_switches(model: "ModelConfig") -> dict[str, str]:
    """Return the switches that are on although no layer of the pattern has them, and the kinds that do."""
    unread = unread_keys(model.pattern)
    on = [switch for switch in SWITCHES if attrgetter(switch)(model)]
    return {switch: unread[key] for switch in on for key in (switch, switch.partition(".")[0]) if key in unread}


def can_cut(model: "ModelConfig") -> bool:
    """Return whether parallel.context can cut the sequences of every layer."""
    return not any(kind.uncut(model) for kind in kinds_in(model.pattern))


def named_layers(model: "ModelConfig") -> Iterator[tuple[str, LayerKind]]:
    """Yield the name of every layer, of the extra depth too, and its kind."""
    for stack, pattern in (("decoder", model.pattern), (MTP, model.mtp.pattern or "")):
        yield from ((f"{stack}.layers.{i}", kind) for i, kind in enumerate(layers_of(pattern)))


def mixer_of(parameter: str, model: "ModelConfig") -> tuple[LayerKind, str] | None:
    """Return the kind of a parameter's layer, and its name in the mixer; None: it is in no mixer."""
    found = _MIXER.fullmatch(parameter)
    if found is None:
        return None
    pattern = model.mtp.pattern or "" if found["stack"] == MTP else model.pattern
    return kind_of(pattern[int(found["layer"])]), found["name"]


def weight_of(parameter: str, model: "ModelConfig") -> Weight | Stack | None:
    """Return what a kind declares of a parameter of a model, or of the stack in its place; None: it is in no mixer."""
    mixer = mixer_of(parameter, model)
    if mixer is None:
        return None
    kind, name = mixer
    return kind.stored(model).get(name) or kind.weights(model)[name]


def stacks_of(model: "ModelConfig") -> dict[str, Stack]:
    """Return the stacks of every layer by their names in a checkpoint; the parts have their full names."""
    return {
        f"{layer}.mixer.{name}": Stack(stack.weight, tuple(f"{layer}.mixer.{part}" for part in stack.parts))
        for layer, kind in named_layers(model)
        for name, stack in kind.stacks(model).items()
    }


def obstacles(model: "ModelConfig") -> list[str]:
    """Return why layers of a model, or its last norm, have no class in the modeling files; empty if all have one."""
    kinds: tuple[Any, ...] = (*kinds_in(model.pattern), norms.kind_of(model.final_norm))
    return [answer.reason for kind in kinds if isinstance(answer := kind.exported(model), Cannot)]


def described() -> str:
    """Return the letters and names of all kinds, for messages."""
    return ", ".join(f"{kind.letter} ({kind.name})" for kind in all_kinds())
