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
