"""YAML files of configs and mixtures, with errors that say where and what to do."""

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_blackmamba.settings.base import ConfigError

MOST_LEVELS, MOST_VALUES = 50, 100_000
REPLACED = ("bool", "float", "int", "timestamp")


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 3e11 is a number, `off`, 12:30, 010 and 2024-01-01 are text, and a key given twice is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it without ClassVar
        first: [(tag, pattern) for tag, pattern in found if tag.rpartition(":")[2] not in REPLACED]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _first, _pattern in (
    ("bool", "TtFf", r"[Tt]rue|TRUE|[Ff]alse|FALSE"),
    ("int", "-+0123456789", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)"),
    (
        "float",
        "-+.0123456789",
        r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?)"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list(_first))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML file whose top level is a mapping, without processing `include:`."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        _count(content)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>", line', "on line")
        advice = (
            'Put a value that begins with * or & in quotes, such as pattern: "*E*E"'
            if "alias" in said or "anchor" in said
            else "Remove one of the two"
            if "is given twice" in said
            else "The keys of a section need the same indentation"
        )
        raise ConfigError(f"{path}: not valid YAML: {said}. {advice}") from None
    except (RecursionError, _TooLarge):
        raise ConfigError(
            f"{path}: a config has at most {MOST_LEVELS} levels and {MOST_VALUES:,} values, those of aliases (*name)"
            " counted each time. Remove what makes it larger."
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, not a {type(content).__name__}")
    return content


def parse(value: str) -> Any:
    """Parse the value of an override as YAML, or return the text itself if it is not YAML (a pattern like *-*-)."""
    try:
        parsed = yaml.load(value, _Loader)
        _count(parsed)
    except (yaml.YAMLError, RecursionError, _TooLarge):
        return value
    return parsed


class _TooLarge(Exception):
    """A value that has more parts or levels than a config needs, or that contains itself."""


def _count(value: Any, above: int = 0, before: int = 0) -> int:
    """Return `before` plus the number of values inside `value`."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if above > MOST_LEVELS or before > MOST_VALUES:
        raise _TooLarge
    for part in parts:
        before = _count(part, above + 1, before + 1)
    return before
