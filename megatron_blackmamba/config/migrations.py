"""The version of saved configs, and the changes that bring an older one up to date.

Checkpoints, run folders and exports save a config with the value of every key. A key that a saved config lacks did not
exist when it was saved. It gets its default, so a new key needs no entry here if its default does what runs did before
the key existed. A key that is renamed or removed needs one, and so does a default that changes what a run does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_blackmamba import __version__
from megatron_blackmamba.config.base import ConfigError

VERSION_KEY = "version"
Content = dict[str, Any]


@dataclass(frozen=True)
class Migration:
    """A change to saved configs; `change` alters one of the version before in place."""

    why: str
    change: Callable[[Content], None]


MIGRATIONS: tuple[Migration, ...] = ()
"""The first entry turns version 1 into version 2, and so on. Append only."""


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
            f" {current_version()}). Upgrade: pip install -U megatron-blackmamba."
        )
    migrated = _copied({key: value for key, value in content.items() if key != VERSION_KEY})
    for migration in MIGRATIONS[version - 1 :]:
        try:
            migration.change(migrated)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return migrated


def rename(old: str, new: str) -> Callable[[Content], None]:
    """Move a key, such as `init.from`, with its value."""

    def change(content: Content) -> None:
        section, key = _section(content, old)
        if key in section:
            value = section.pop(key)
            section, key = _section(content, new)
            section[key] = value

    return change


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


def _section(content: Content, name: str) -> tuple[Content, str]:
    *sections, key = name.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    return content, key


def _copied(content: Content) -> Content:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in content.items()}
