"""The messages of the command line outside its commands."""

import pytest
from typer.testing import CliRunner

from megatron_blackmamba import cli


@pytest.mark.parametrize(("quiet", "said"), [(False, "blackmamba: an old name\n"), (True, "")])
def test_notes_are_silenced_by_quiet(quiet, said, capsys):
    cli._note("an old name", quiet)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("plan tiny --check", "need --nodes"),
        ("plan tiny --suggest", "need --nodes"),
        ("plan tiny --mfu 0.2", "need --nodes"),
        ("evaluate runs/tiny --watch --out scores.json", "no --out"),
        ("evaluate runs/tiny --watch --json", "no --json"),
        ("study smoke --gpus 4", "add --slurm"),
        ("study smoke --slurm --minutes 5", "leave out them or --slurm"),
    ],
)
def test_options_without_effect_are_refused(words, refused):
    said = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})
    assert said.exit_code == 2
    assert refused in " ".join(said.output.replace("│", " ").split())
