"""`.ci/run` runs a few failed tests a second time and names those that pass then."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"
TESTS = """
import pathlib
import pytest

@pytest.mark.xdist_group("lamps")
@pytest.mark.parametrize("name", ["a b", "c.d", "e/f"])
def test_lamp(name):
    lit = pathlib.Path(__file__).with_name(name.replace("/", "-"))
    before, _ = lit.exists(), lit.touch()
    assert before or name not in {unsteady}

@pytest.mark.parametrize("count", range({broken}))
def test_broken(count):
    assert False
"""


@pytest.fixture
def again(tmp_path):
    """Run tests of which some fail the first time and some always, and then those that failed."""

    def run(unsteady=(), broken=0, text=None):
        (tmp_path / ".ci").mkdir()
        shutil.copy(CI / "again.py", tmp_path / ".ci")
        (tmp_path / "tests/deep").mkdir(parents=True)
        (tmp_path / "tests/deep/test_some.py").write_text(text or TESTS.format(unsteady=[*unsteady], broken=broken))
        # Hypothesis and other plugins that these tests do without would take most of the time.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
        first = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "1",
            "--dist",
            "loadgroup",
            "--junitxml=report.xml",
            "--rootdir=.",
        ]
        subprocess.run(first, cwd=tmp_path, env=environment, capture_output=True)
        second = [sys.executable, tmp_path / ".ci/again.py", "report.xml"]
        return subprocess.run(second, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_unsteady_tests_pass_and_are_named(again):
    ran = again(unsteady=["a b", "e/f"])
    assert ran.returncode == 0, ran.stdout
    assert ran.stderr.splitlines() == [
        "unsteady: tests/deep/test_some.py::test_lamp[a b]",
        "unsteady: tests/deep/test_some.py::test_lamp[e/f]",
    ]
    assert "2 passed" in ran.stdout


def test_broken_tests_fail_again(again):
    assert again(unsteady=["c.d"], broken=1).returncode == 1


def test_many_failures_are_not_run_again(again):
    ran = again(broken=4)
    assert ran.returncode == 1 and "4 failed tests to run again" in ran.stderr and not ran.stdout


def test_uncollected_modules_fail(again):
    assert again(text="import nothing_of_that_name").returncode == 1


# `.ci/run` explains every skipped test by a line of `.ci/skips.txt`.

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
