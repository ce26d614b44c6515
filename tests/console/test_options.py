"""Options of commands, declared as the fields of a dataclass."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from megatron_blackmamba.console.options import taking


@dataclass(frozen=True)
class Base:
    names: Annotated[tuple[str, ...], typer.Option("--name", help="Names.")] = ()
    size: Annotated[str | None, typer.Option(help="Size.")] = None


@dataclass(frozen=True)
class Chosen(Base):
    loud: Annotated[bool, typer.Option("--loud", help="Loud.")] = False
    for_python: int = 1


@pytest.fixture
def command():
    """A command, and the calls that it received."""
    app, calls = typer.Typer(), []

    @app.command()
    @taking(Chosen)
    def greet(who: str, options: Chosen, times: int = 1) -> None:
        """Greet somebody."""
        calls.append((who, options, times))

    return app, calls


def test_fields_become_options_and_the_object_arrives(command):
    app, calls = command
    arguments = ["you", "--name", "a", "--name", "b", "--size", "3", "--loud", "--times", "2"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, ["me"]).exit_code == 0
    assert calls == [("you", Chosen(("a", "b"), "3", True), 2), ("me", Chosen(), 1)]


def test_help_has_every_option_but_those_for_python(command):
    text = CliRunner().invoke(command[0], ["--help"]).output
    assert "Greet somebody." in text and all(option in text for option in ("--name", "--size", "--loud", "--times"))
    assert "for-python" not in text
