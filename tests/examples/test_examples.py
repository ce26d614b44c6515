"""Every file in examples/ runs with few steps and prints what it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.run_all import EXAMPLES
from tests.thorough import thorough

ROOT = Path(__file__).resolve().parents[2]
PRINTS = {
    "ops.py": r"argmax 5\.\d+, Sinkhorn 1\.\d+",
    "training_loop.py": r"step 3  loss \d\.\d+\nsaved runs/training_loop",
    "own_trainer.py": r"saved step 2\n.*exit code 75",
    "transformers_trainer.py": r"top-1 agreement .*TrainOutput\(global_step=2",
    "train_plot_generate.ipynb": r"documents, [\d,]+ tokens.*def ",
}
pytestmark = [pytest.mark.xdist_group("examples"), thorough]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return the output of each example; all run in one process in an empty folder."""
    folder = tmp_path_factory.mktemp("examples")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.examples.run_all"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PRINTS)
def test_example_runs_and_prints_its_result(name, printed):
    if name == "transformers_trainer.py":
        pytest.importorskip("accelerate")
    assert re.search(PRINTS[name], printed[name], re.DOTALL), printed[name]


def test_export_is_fine_tuned_on_a_text(printed):
    pytest.importorskip("accelerate")
    assert re.search(r"TrainOutput\(global_step=2", printed["own text"]), printed["own text"]


def test_every_example_is_run():
    elsewhere = {"pretrain_in_megatron_lm.py", "pretrain_in_megatron_bridge.py"}  # by tests/megatron_lm
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} == {*PRINTS, *elsewhere}
