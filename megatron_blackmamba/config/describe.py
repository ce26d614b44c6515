"""Descriptions of every config key, for the reference pages and for new run files."""

import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from megatron_blackmamba.config.load import load, merge_files, walk
from megatron_blackmamba.config.schema import MODELINE, NAME, run_file_schema
from megatron_blackmamba.formats import atomic
from megatron_blackmamba.settings import ConfigError, Section

WIDTH = 110
HEADER = """\
# {name}: {command} trains it, and `blackmamba config {file}` checks this file.
# Lines that begin with #: are keys at their defaults. To change one, remove "#: ", the space too, there and
# before the section.
"""


@dataclass(frozen=True)
class Key:
    """One config key, or a section of them."""

    path: str
    """Its full name, as a.b.c."""
    kind: str
    """The values that it takes."""
    default: Any
    required: bool
    description: str
    section: type[Section] | None


def every_key() -> Iterator[Key]:
    """Yield the keys of a run, each section before the keys in it."""
    for path, field, inner in walk():
        default = None if field.is_required() else field.default
        description = " ".join((field.description or "").split())
        yield Key(path, _kind(field), default, field.is_required(), description, inner)


def new_run(name: str, source: str, overrides: list[str], file: Path) -> str:
    """Return a run file in which every key has its description; keys that `source` leaves alone are comments."""
    run = load(source, [*overrides, f"name={name}"]).model_dump(mode="json", by_alias=True)
    _, origin = merge_files([source])
    given = {*origin, "name", "training.tokens", *(override.partition("=")[0] for override in overrides)}
    if mixture := run["data"]["mixture"]:
        same_folder = "data.mixture" not in origin and file.parent == Path()
        run["data"]["mixture"] = mixture if same_folder else str(Path(mixture).absolute())
        given |= {"data.kind", "data.mixture"}
    steps = dict(override.split("=", 1) for override in overrides).get("training.steps")
    quoted = shlex.quote(str(file))
    lines = [MODELINE + HEADER.format(name=name, command=f"`blackmamba train {quoted}`", file=quoted)]
    for key in every_key():
        *sections, last = key.path.split(".")
        indent = "  " * len(sections)
        text = key.description or (key.section.__doc__ or "" if key.section else "")
        if not sections and key.section:
            lines.append("")
        lines += [f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - len(indent))]
        if key.section:
            lines.append(f"{indent}{last}:")
            continue
        if key.path == "training.tokens" and steps:
            lines.append(
                f"{indent}# These steps set `tokens`, with the batch and the sequence length.\n{indent}steps: {steps}"
            )
            continue
        value: Any = run
        for part in key.path.split("."):
            value = value[part]
        is_given = any(f"{each}.".startswith(f"{key.path}.") for each in given)
        lines.append(f"{indent}{'' if is_given else '#: '}{last}: {_yaml(value)}")
    return _without_empty_sections("\n".join(lines) + "\n")


def write_new(name: str, source: str, overrides: list[str], file: Path) -> None:
    """Write a new run file, and the schema for editors beside it; refuse to replace a run file."""
    content = new_run(name, source, overrides, file)
    try:
        with open(file, "x", encoding="utf-8") as out:
            out.write(content)
    except FileExistsError:
        raise ConfigError(f"{file} exists. Choose another name, or delete it.") from None
    atomic.write_json(file.with_name(NAME), run_file_schema())


def _without_empty_sections(text: str) -> str:
    """Turn the header of a section without an active key into a comment: YAML would read the section as null."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.endswith(":") and not line.lstrip().startswith("#"):
            depth = len(line) - len(line.lstrip())
            inside = []
            for other in lines[number + 1 :]:
                if other.strip() and len(other) - len(other.lstrip()) <= depth:
                    break
                inside.append(other.strip())
            if not any(other and not other.startswith("#") and not other.endswith(":") for other in inside):
                lines[number] = f"{line[:depth]}#: {line[depth:]}"
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    """Return a value as one line of YAML; null for nothing."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("...").strip()


def _kind(field: FieldInfo) -> str:
    bounds = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    limits = [f"{sign} {_bound(getattr(m, b))}" for m in field.metadata for b, sign in bounds.items() if hasattr(m, b)]
    return ", ".join([_name(field.annotation), *limits])


def _bound(limit: float) -> str:
    """Return a limit as people write it: large integers are powers of two."""
    for less, text in ((0, ""), (1, " - 1")):
        power = int(limit) + less
        if limit >= 2**16 and power == limit + less and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{text}"
    return f"{limit:g}" if limit < 10**5 else f"{limit:,}"


def _name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (list, dict):
        return "list" if get_origin(annotation) is list else "sections"
    if get_origin(annotation) is tuple:
        return "two numbers"
    optional = [kind for kind in get_args(annotation) if kind is not type(None)]
    if optional and get_origin(annotation) is not None and str in optional and len(get_args(annotation)) != 2:
        return "text"
    if optional and type(None) in get_args(annotation):
        return f"{_name(optional[0])} or null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    names = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return names.get(annotation, "text")
