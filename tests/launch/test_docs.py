import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.launch.thresholds import Thresholds
from megatron_blackmamba.plan import gpus

PAGES = [*(Path(__file__).parents[2] / "docs").glob("*.md"), Path(__file__).parents[2] / "README.md"]


def launch_lines() -> list[str]:
    """The launches that the docs tell people to type."""
    lines = [line for page in PAGES if page.exists() for line in page.read_text().splitlines()]
    return sorted({line for line in lines if line.startswith("blackmamba launch ")})


@pytest.mark.parametrize("line", launch_lines())
def test_a_launch_of_the_docs_would_submit(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, [*shlex.split(line, comments=True)[1:], "--dry-run"])
    ready = "cannot be submitted yet" not in shown.output  # only the data may be missing here
    assert shown.exit_code == (0 if ready else 2), shown.output
    assert "#SBATCH" in shown.output


def test_the_described_gpu_of_the_docs_is_complete(tmp_path):
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text()
    (block,) = re.findall(r"```yaml\n(name: .*?)```", page, re.DOTALL)
    (tmp_path / "gpu.yaml").write_text(block)
    assert gpus.find(str(tmp_path / "gpu.yaml")).model_fields_set == set(gpus.Gpu.model_fields)


def test_a_dry_run_without_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["launch", "tiny", "--nodes", "1", "--gpus-per-node", "2", "--dry-run"]
    missing = CliRunner().invoke(app, [*words, "data.kind=mixture", "data.mixture=nowhere.yaml", "--json"])
    assert missing.exit_code == 2
    assert "nowhere.yaml" in json.loads(missing.stdout)["missing_data"]
    ready = CliRunner().invoke(app, [*words, "--json"])
    assert ready.exit_code == 0 and json.loads(ready.stdout)["missing_data"] is None
    assert "warning: synthetic tokens come from a generator" in ready.stderr


def test_documented_thresholds_are_the_defaults():
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text()
    table = page.split("| threshold | default |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    documented = {
        name: float(value)
        for names, values in rows
        for name, value in zip(re.findall(r"\w+", names), values.split(","), strict=True)
    }
    assert documented == asdict(Thresholds())
