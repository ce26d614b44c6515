"""Layer kinds: one file per letter of `model.pattern`, with everything that the rest of the project asks about it.

A file in this package that defines a LayerKind is found by itself; `register` adds one from elsewhere.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from megatron_blackmamba.kinds.base import Cannot, Decoding, Division, LayerKind, Sizes, Stack

if TYPE_CHECKING:
    from megatron_blackmamba.config import ModelConfig

__all__ = [
    "Cannot",
    "Decoding",
    "Division",
    "LayerKind",
    "Sizes",
    "Stack",
    "all_kinds",
    "can_cut",
    "described",
    "kind_of",
    "kinds_in",
    "layers_of",
    "register",
    "routes",
    "stacks_of",
    "unregister",
]

_KINDS: dict[str, LayerKind] = {}


class KindError(TypeError):
    """A layer kind that does not answer every question, or takes another kind's letter."""


def register(kind: type[LayerKind]) -> LayerKind:
    """Add a kind. Refuse one that leaves a question open, by name."""
    missing = [name for name in ("letter", "name", "block") if not hasattr(kind, name)]
    missing += sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise KindError(
            f"{kind.__name__} does not answer: {', '.join(missing)}. Define each; Cannot(reason) is an answer too."
        )
    if len(kind.letter) != 1 or kind.letter in _KINDS:
        taken = f"taken by {_KINDS[kind.letter].name}" if kind.letter in _KINDS else "not one character"
        raise KindError(f"{kind.__name__}: its letter {kind.letter!r} is {taken}. Choose another letter.")
    _KINDS[kind.letter] = kind()
    return _KINDS[kind.letter]


def unregister(letter: str) -> None:
    """Remove a kind."""
    del _KINDS[letter]


def all_kinds() -> tuple[LayerKind, ...]:
    """Return every kind, in the order of their files."""
    return tuple(_KINDS.values())


def kind_of(letter: str) -> LayerKind:
    """Return the kind of a letter."""
    if letter not in _KINDS:
        raise KeyError(f"no layer kind has the letter {letter!r}: there are {described()}")
    return _KINDS[letter]


def layers_of(pattern: str) -> Iterator[LayerKind]:
    """Yield the kind of each layer."""
    return map(kind_of, pattern)


def kinds_in(pattern: str) -> tuple[LayerKind, ...]:
    """Return the kinds that a pattern uses, each once, in the order of their first layer."""
    return tuple(map(kind_of, dict.fromkeys(pattern)))


def routes(pattern: str) -> bool:
    """Return whether some layer sends tokens to experts."""
    return any(kind.routed for kind in kinds_in(pattern))


def can_cut(pattern: str) -> bool:
    """Return whether parallel.context can cut the sequences of every layer."""
    return all(kind.cut is None for kind in kinds_in(pattern))


def stacks_of(model: "ModelConfig") -> dict[str, Stack]:
    """Return the stacks of every layer by their names in a checkpoint; the parts have their full names."""
    return {
        f"decoder.layers.{i}.mixer.{name}": Stack(
            stack.shape, tuple(f"decoder.layers.{i}.mixer.{part}" for part in stack.parts)
        )
        for i, kind in enumerate(layers_of(model.pattern))
        for name, stack in kind.stacks(model).items()
    }


def described() -> str:
    """Return the letters and names of all kinds, for messages."""
    return ", ".join(f"{kind.letter} ({kind.name})" for kind in all_kinds())


def _load() -> None:
    for module in iter_modules(__path__):
        if module.name == "base":
            continue
        found = vars(import_module(f"{__name__}.{module.name}")).values()
        for kind in found:
            if (
                isinstance(kind, type)
                and issubclass(kind, LayerKind)
                and kind.__module__ == f"{__name__}.{module.name}"
            ):
                register(kind)


_load()
