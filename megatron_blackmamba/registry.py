"""Registries of kinds: layers, routers, norms and optimizers that are each defined by a file of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules, resolve_name
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel


@dataclass(frozen=True)
class Cannot:
    """The answer of a kind that does not support something, with the reason as users read it."""

    reason: str


class ImportFailed(ValueError):
    """A module of BLACKMAMBA_IMPORT that cannot be imported."""


def extensions() -> list[str]:
    """Return the modules that BLACKMAMBA_IMPORT names, separated by commas."""
    return os.environ.get("BLACKMAMBA_IMPORT", "").replace(",", " ").split()


@cache
def import_extensions() -> None:
    """Import the modules that BLACKMAMBA_IMPORT names, so that they register what they define.

    They may be in the current folder, which Python looks through last.
    """
    if extensions():
        sys.path.append(os.getcwd())
    for name in extensions():
        try:
            import_module(name)
        except Exception as error:
            raise ImportFailed(f"BLACKMAMBA_IMPORT={name}: {_cause(name, error)}") from error


def _cause(name: str, error: Exception) -> str:
    """Return why a module could not be imported, in one line, with advice."""
    if name.endswith(".py"):
        return f"give the name of the module, {name.removesuffix('.py')}, not its file."
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return f"{error}. Add the folder of the module to PYTHONPATH."
    said = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, ModuleNotFoundError):
        return f"the module imports what is missing: {said}. Install it, or add its folder to PYTHONPATH."
    return f"the module cannot be imported: {type(error).__name__}: {said}. Correct the module."


def own_module() -> str:
    """Return what to do about a kind that a module of the user's defines, for messages."""
    imported = ", ".join(extensions())
    if imported:
        return f"The modules in BLACKMAMBA_IMPORT ({imported}) define no other."
    return (
        "If a module of your own defines it, name that module in BLACKMAMBA_IMPORT; the run's config.yaml names it too."
    )


class KindError(ValueError):
    """A kind that lacks a definition, contradicts itself, or takes the name of another kind."""


class UnknownKind(ValueError):
    """A name that no kind has."""


class Kind:
    """A base class of kinds. Subclasses list what to define: abstract methods, and fields without a value."""

    name: ClassVar[str]
    settings: ClassVar[type[BaseModel] | None] = None
    """A Section of config keys that only this kind has: `model.extensions.NAME.KEY`, or `optimizer.extensions`."""
    modeling: ClassVar[str | None] = None
    """Its class in exports, as "package.module:class". Exports get a copy of the file, if it is not in `hf/`.

    Beside torch and transformers it imports only from `megatron_blackmamba.hf`.
    """

    @property
    def section(self) -> str:
        """Return the name of this section."""
        return self.name.replace(" ", "_")

    def settings_in(self, holder: Any) -> Any:
        """Return the values of these keys in a ModelConfig or OptimizerConfig."""
        assert self.settings
        return self.settings.model_validate(holder.extensions.get(self.section, {}))

    def named(self, field: str) -> Any:
        """Return what a field names as "package.module:class"."""
        name = getattr(self, field)
        try:
            return resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise KindError(f"{type(self).__name__}.{field}={name!r} cannot be imported: {error}") from error

    @classmethod
    def unanswered(cls) -> list[str]:
        """Return what this kind leaves undefined although it must define it, unlike other kinds."""
        return []


K = TypeVar("K", bound=Kind)


class Registry(Generic[K]):
    """The kinds of one sort by name, in the order of their files."""

    def __init__(self, base: type[K], chosen_by: str, *, name: str = "name"):
        """Create an empty registry.

        Args:
            base: Base class of the kinds.
            chosen_by: Config key that names a kind.
            name: Field of a kind that holds its name.
        """
        self.base, self.chosen_by, self.name = base, chosen_by, name
        self._kinds: dict[str, K] = {}

    def discover(self, package: str, folders: Iterable[str]) -> None:
        """Register every kind that a file of the package defines, or the file `kind` of a folder in it."""
        for module in iter_modules(folders):
            name = f"{package}.{module.name}.kind" if module.ispkg else f"{package}.{module.name}"
            defined = [x for x in vars(import_module(name)).values() if isinstance(x, type) and x.__module__ == name]
            for kind in defined:
                if issubclass(kind, self.base) and kind is not self.base:
                    self.register(kind)

    def register(self, kind: type[K]) -> K:
        """Add a kind; refuse one that lacks a definition, by name."""
        missing = [field for field in self.base.__annotations__ if not hasattr(kind, field)]
        missing += sorted(getattr(kind, "__abstractmethods__", ()))
        if missing := missing + kind.unanswered():
            raise KindError(
                f"{kind.__name__} does not define: {', '.join(missing)}. Define each; Cannot(reason) is allowed too."
            )
        name = getattr(kind, self.name)
        if name in self._kinds:
            other = type(self._kinds[name])
            raise KindError(
                f"{kind.__name__} of {kind.__module__}: its {self.name} {name!r} is taken by {other.__name__} of"
                f" {other.__module__}. Choose another {self.name}, or import one of the two only."
            )
        self._kinds[name] = kind()
        return self._kinds[name]

    def unregister(self, name: str) -> None:
        """Remove a kind."""
        del self._kinds[name]

    def all_kinds(self) -> tuple[K, ...]:
        """Return every kind, in the order of their files."""
        return tuple(self._kinds.values())

    def kind_of(self, name: str) -> K:
        """Return the kind of a name."""
        if name not in self._kinds:
            import_extensions()
        if name not in self._kinds:
            known = ", ".join(self._kinds)
            raise UnknownKind(f"{self.chosen_by}={name}: no such kind. Choose one of {known}. {own_module()}")
        return self._kinds[name]

    def check_keys(self, known: Iterable[str]) -> None:
        """Refuse a kind that reads a config key which is none of `known`, nor a section of them."""
        section, known = self.chosen_by.rpartition(".")[0], tuple(known)
        for key, kinds in self.readers().items():
            if not any(f"{each}.".startswith(f"{section}.{key}.") for each in known):
                raise KindError(
                    f"{type(kinds[0]).__name__}.keys names {key!r}, but the config has no key {section}.{key}. Add the"
                    " field to the section's class in settings/, with a description, or remove the key."
                )

    def kinds_by_key(self) -> dict[str, list[str]]:
        """Return the names of the kinds that read each config key of `keys`, which not all kinds read."""
        return {key: [getattr(kind, self.name) for kind in kinds] for key, kinds in self.readers().items()}

    def readers(self) -> dict[str, list[K]]:
        """Return the kinds that read each config key of `keys`."""
        readers: dict[str, list[K]] = {}
        for kind in self._kinds.values():
            for key in kind.keys:  # type: ignore[attr-defined]
                readers.setdefault(key, []).append(kind)
        return readers

    def unread(self, settings: Any) -> list[str]:
        """Return an error for each key of a config section that the chosen kind does not read, but that is set."""
        section = self.chosen_by.rpartition(".")[0]
        read = self.kind_of(settings.kind).keys  # type: ignore[attr-defined]
        return [
            f"{section}.{key}={getattr(settings, key)}: {self.chosen_by}={settings.kind} does not read this key."
            f" Remove it, or choose {self.chosen_by}={' or '.join(readers)}."
            for key, readers in sorted(self.kinds_by_key().items())
            if key not in read and getattr(settings, key) != type(settings).model_fields[key].default
        ]
