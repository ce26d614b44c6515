"""`.ci/run` explains every skipped test by a line of `.ci/skips.txt`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"
TABLE = "2 | needs a (lamp|torch) | dark\nany | this processor lacks \\w+ | old\n"


@pytest.fixture
def judge(tmp_path):
    """Skip tests for these reasons in a real pytest run, and judge its report."""

    def judged(*reasons, module=None):
        tests = [f"def test_{i}():\n    pytest.skip({reason!r})\n" for i, reason in enumerate(reasons)]
        (tmp_path / "test_some.py").write_text("import pytest\n" + "".join(tests))
        if module:
            (tmp_path / "test_module.py").write_text(
                f"import pytest\npytest.skip({module!r}, allow_module_level=True)\n"
            )
        (tmp_path / "table.txt").write_text(TABLE)
        report = tmp_path / "report.xml"
        pytest_run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", tmp_path]
        few_plugins = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        subprocess.run(pytest_run, cwd=tmp_path, env=few_plugins, capture_output=True)
        judging = [sys.executable, CI / "skips.py", report, tmp_path / "table.txt"]
        return subprocess.run(judging, capture_output=True, text=True)

    return judged


def test_explained_skips_pass_and_are_counted(judge):
    judged = judge("needs a lamp", "needs a torch", *["this processor lacks avx512"] * 3)
    assert judged.returncode == 0, judged.stderr
    assert "    3  this processor lacks avx512" in judged.stdout and "    5  skipped in all" in judged.stdout


def test_new_reason_fails_by_name(judge):
    judged = judge("needs a lamp", module="no compiler here")
    assert judged.returncode == 1
    assert "unexplained skip of 1 tests: no compiler here" in judged.stderr


def test_more_skips_than_expected_fail(judge):
    judged = judge(*["needs a lamp"] * 3)
    assert judged.returncode == 1 and "3 tests skipped, 2 expected: needs a (lamp|torch)" in judged.stderr


def test_shipped_table_is_readable():
    rows = [line for line in (CI / "skips.txt").read_text().splitlines() if not line.startswith("#")]
    assert rows and all(len(row.split(" | ")) == 3 for row in rows)
