import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("pages")
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[-1])
def test_examples_of_extending_run_as_printed(code, session, tmp_path):
    done = session.run(code, tmp_path, "python")
    assert done.returncode == 0, done.stdout
