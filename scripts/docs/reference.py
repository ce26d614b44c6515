"""The reference pages: every command from the command line, every config key from the schema."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from megatron_blackmamba.cli import app
from megatron_blackmamba.config.describe import Key, every_key

_EXAMPLE = re.compile(r"\[dim\](.*?)\[/dim\]", re.DOTALL)


def commands_page() -> str:
    """Return the page with the help of every command."""
    lines = ["# Commands", "", "`blackmamba COMMAND --help` prints the same.", ""]
    for words, command in _commands(typer.main.get_command(app), ["blackmamba"]):
        lines += _command(words, command)
    return "\n".join(lines)


def config_page() -> str:
    """Return the page with every config key."""
    keys = list(every_key())
    lines = [
        "# Config keys",
        "",
        "A run file has these keys, one section for each heading. `blackmamba config RUN` prints the values of a run,",
        "and `blackmamba new NAME` writes a run file with these descriptions.",
        "",
        *_table(keys, ""),
    ]
    for section in keys:
        if section.section:
            lines += [f"## {section.path}", "", section.description, "", *_table(keys, section.path)]
    return "\n".join(lines)


def _table(keys: list[Key], section: str) -> list[str]:
    """Return the table of the keys directly in a section; that of the top level is empty."""
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        if key.section or key.path.rpartition(".")[0] != section:
            continue
        default = "required" if key.required else f"`{_shown(key.default)}`"
        rows.append(f"| `{key.path}` | {_cell(key.kind)} | {default} | {_cell(key.description)} |")
    return [*rows, ""]


def _shown(value: Any) -> str:
    """Return a default as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    return re.sub(r"\[/?(?:dim|bold)\]", "", text)


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    for name, inner in sorted(command.commands.items()):
        if hasattr(inner, "commands"):
            yield from _commands(inner, [*words, name])
        else:
            yield [*words, name], inner


def _command(words: list[str], command: Any) -> list[str]:
    context = typer.Context(command, info_name=" ".join(words))
    text = command.help or ""
    examples = [" ".join(found.split()) for found in _EXAMPLE.findall(text)]
    lines = [f"## {' '.join(words)}", "", _plain(_EXAMPLE.sub("", text)).strip(), ""]
    lines += ["```text", *(part for part in command.get_usage(context).splitlines()), "```", ""]
    if examples:
        lines += ["Examples:", "", "```sh", *examples, "```", ""]
    rows = []
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "argument":
            names = f"`{_cell(parameter.metavar or parameter.name.upper())}`"
        rows.append(f"| {names} | {_cell(parameter.help or '')} | {_default(parameter)} |")
    return [*lines, "| argument | meaning | default |", "|---|---|---|", *rows, ""] if rows else lines


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return _cell(parameter.show_default)
    default = parameter.default
    if (
        default is None
        or default is False
        or default == []
        or callable(default)
        or type(default).__name__ == "Sentinel"
    ):
        return ""
    return f"`{getattr(default, 'value', default)}`"
