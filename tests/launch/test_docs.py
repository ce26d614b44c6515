import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.launch.thresholds import Thresholds

PAGES = [*(Path(__file__).parents[2] / "docs").glob("*.md"), Path(__file__).parents[2] / "README.md"]


def launch_lines() -> list[str]:
    """The launches that the docs tell people to type."""
    lines = [line for page in PAGES if page.exists() for line in page.read_text().splitlines()]
    return sorted({line for line in lines if line.startswith("blackmamba launch ")})


@pytest.mark.parametrize("line", launch_lines())
def test_a_launch_of_the_docs_would_submit(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, [*shlex.split(line, comments=True)[1:], "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "#SBATCH" in shown.output


def test_documented_thresholds_are_the_defaults():
    page = (Path(__file__).parents[2] / "docs/launching.md").read_text()
    table = page.split("| threshold | default |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    documented = {
        name: float(value)
        for names, values in rows
        for name, value in zip(re.findall(r"\w+", names), values.split(","), strict=True)
    }
    assert documented == asdict(Thresholds())
