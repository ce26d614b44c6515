"""Keys under older names: the versions of saved configs with their changes, and renamed keys in hand-written files.

Checkpoints, run folders and exports save a config with the value of every key. A key that a saved config lacks did not
exist when it was saved. It gets its default, so a new key needs no entry here if its default does what runs did before
the key existed. A key that is renamed or removed needs one, and so does a default that changes what a run does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_blackmamba.settings.base import ConfigError
from megatron_blackmamba.version import __version__

VERSION_KEY = "version"
Content = dict[str, Any]


@dataclass(frozen=True)
class Migration:
    """A change to saved configs; `change` alters one of the version before in place."""

    why: str
    change: Callable[[Content], object]


RENAMED = {
    "model.linear": "kernels.linear",
    "model.dispatcher": "kernels.dispatcher",
    "model.scan": "kernels.scan",
    "init.from": "start.from",
    "init.allow": "resume.allow",
}
"""Old name → new name. Config files and overrides may use the old one, with a note."""
RENAMED_VALUES = {"kernels.scan": {"cpu": "cpp"}}
"""Key → old value → new value. Config files and overrides may use the old one, with a note."""


def current_version() -> int:
    """Return the version of the configs that this program saves."""
    return 1 + len(MIGRATIONS)


def migrate(content: Content, where: str) -> Content:
    """Return a saved config as this version would have saved it, without its version number."""
    version = content.get(VERSION_KEY, 1)  # 0.1.0 wrote no number
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ConfigError(f"{where}: version={version!r} is not a version of a saved config. Restore the file.")
    if version > current_version():
        raise ConfigError(
            f"{where}: a newer megatron-blackmamba saved this config (version {version}; {__version__} reads up to"
            f" {current_version()}). Upgrade: git pull, then make -B install."
        )
    migrated = _copied({key: value for key, value in content.items() if key != VERSION_KEY})
    for migration in MIGRATIONS[version - 1 :]:
        try:
            migration.change(migrated)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return migrated


def rename(names: Mapping[str, str]) -> Callable[[Content], None]:
    """Move keys with their values, old name → new name."""

    def change(content: Content) -> None:
        for old, new in names.items():
            _move(content, old, new)

    return change


def accept_old_names(content: Content, where: str, note: Callable[[str], None]) -> None:
    """Move the renamed keys of a config that a person wrote, in place, and note each one."""
    for old, new in RENAMED.items():
        if _move(content, old, new):
            note(f"{where}: {old} is called {new} now; the old name still works.")
    for old, new in _rename_values(content):
        note(f"{where}: {old} is called {new} now; the old name still works.")


def remove(name: str, meaning: Any) -> Callable[[Content], None]:
    """Drop a key whose value `meaning` is what every run does now; refuse a config with another value."""

    def change(content: Content) -> None:
        section, key = _section(content, name)
        value = section.pop(key, meaning)
        if value != meaning:
            raise ConfigError(f"{name}={value} is no longer supported; every run has {name}={meaning} now.")

    return change


def assume(name: str, value: Any) -> Callable[[Content], None]:
    """Set a key where it is missing: what runs did before the key existed is not its default today."""

    def change(content: Content) -> None:
        section, key = _section(content, name)
        section.setdefault(key, value)

    return change


def _move(content: Content, old: str, new: str) -> bool:
    """Move a key if it is there. Drop the section that this leaves empty."""
    *sections, key = old.split(".")
    path = [content]
    for section in sections:
        inner = path[-1].get(section)
        if not isinstance(inner, dict):
            return False
        path.append(inner)
    if key not in path[-1]:
        return False
    target, name = _section(content, new)
    if name in target:
        raise ConfigError(f"{old} and {new} are the same key: both are given. Remove {old}.")
    target[name] = path[-1].pop(key)
    for outer, section in zip(reversed(path[:-1]), reversed(sections), strict=True):
        if not outer[section]:
            del outer[section]
    return True


def _section(content: Content, name: str) -> tuple[Content, str]:
    *sections, key = name.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    return content, key


def _rename_values(content: Content) -> list[tuple[str, str]]:
    """Replace values that have another name now, in place; return each assignment before and after."""
    changes = []
    for name, values in RENAMED_VALUES.items():
        section, _, key = name.rpartition(".")
        keys = content.get(section)
        if not isinstance(keys, dict):
            continue
        old = keys.get(key)
        if isinstance(old, str) and old in values:
            keys[key] = values[old]
            changes.append((f"{name}={old}", f"{name}={values[old]}"))
    return changes


def _copied(content: Content) -> Content:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in content.items()}


def _forget_unread_router_keys(content: Content) -> None:
    """Drop keys of model.router that its kind never read: they are refused now."""
    router = content.get("model", {}).get("router", {})
    read = {"sinkhorn": ("iterations", "temperature", "start", "scope"), "softmax": ("aux_loss",)}
    kind = router.get("kind", "sinkhorn")
    for key in set(router) - {"kind", *read.get(kind, router)}:
        del router[key]


def _attend_across_documents(content: Content) -> None:
    """Keep what model.eod_reset left to attention."""
    if content.get("model", {}).get("eod_reset") is not None:
        assume("model.attention.across_documents", True)(content)


MIGRATIONS: tuple[Migration, ...] = (
    Migration("implementations leave model:, and init: is split by when it is read", rename(RENAMED)),
    Migration("a kind of router refuses keys that it does not read", _forget_unread_router_keys),
    Migration("model.eod_reset ends a document for attention too", _attend_across_documents),
    Migration("the kernels in C++ have one name", _rename_values),
)
"""The first entry turns version 1 into version 2, and so on. Append only."""
