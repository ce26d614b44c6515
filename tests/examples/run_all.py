"""Run every example in one process, so that libraries are imported once; print what each printed as JSON.

python -m tests.examples.run_all
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from megatron_blackmamba import export_hf

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FEW_STEPS = {
    "ops.py": [],
    "training_loop.py": ["--steps", "3"],
    "own_trainer.py": [  # hardly learns, so the second validation ends it
        *("training.steps=8", "training.evaluate_every=1", "training.evaluate_batches=1"),
        *("optimizer.learning_rate=1e-6", "optimizer.min_learning_rate=0"),
    ],
    "transformers_trainer.py": ["--steps", "2"],
}


def _notebook(path: Path) -> None:
    """Run the code cells of a notebook in one namespace."""
    names: dict = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)


def _run(path: Path, options: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            if path.suffix == ".ipynb":
                _notebook(path)
            else:
                sys.argv = [str(path), *options]
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            print(f"exit code {int(ended.code or 0)}")
        except BaseException:
            traceback.print_exc(file=said)
    return said.getvalue()


if __name__ == "__main__":
    os.environ |= {"STEPS": "3", "MPLBACKEND": "agg"}
    printed = {name: _run(EXAMPLES / name, options) for name, options in FEW_STEPS.items()}
    printed |= {path.name: _run(path, []) for path in sorted(EXAMPLES.glob("*.ipynb"))}
    with contextlib.redirect_stdout(io.StringIO()):
        export_hf("runs/notebook/model", "exports/notebook")
    text = ["--export", "exports/notebook", "--text", json.__file__, "--length", "64", "--out", "runs/own_text"]
    printed["own text"] = _run(EXAMPLES / "transformers_trainer.py", [*text, "--steps", "2"])
    print(json.dumps(printed))
