"""The commands that docs/data.md offers to try run as printed, in order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_the_commands_to_try_run_as_printed(tmp_path):
    section = re.search(r"^## Try it\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    (block,) = re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", block], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for expected in (".py, record 1", "quantiles: ", "2 shards, ", "all sound", "mixture.yaml: "):
        assert expected in done.stdout, done.stdout
