"""`.ci/run` fails with the first section that fails, and on a slow machine leaves out further ones and names them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FURTHER = ["tests with the fewest instructions", "tests in the C locale, without bytecode", "thorough tests"]
REPORT = "<testsuites><testsuite><testcase name='one'>{}</testcase></testsuite></testsuites>"
MAKE = """#!/usr/bin/env bash
echo "make $*" | tee -a called
[[ "$*" =~ --junitxml=([^ ]+) ]] && cp report.xml "${BASH_REMATCH[1]}"
[[ "$*" != $FAILS ]]
"""


@pytest.fixture
def ci(tmp_path):
    """Run a copy of `.ci/run` in which make, apt-get and shellcheck are stand-ins."""

    def run(minutes=600, fails="nothing", case=""):
        shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
        (tmp_path / "report.xml").write_text(REPORT.format(case))
        (tmp_path / "bin").mkdir()
        for name, text in {"make": MAKE, **dict.fromkeys(("apt-get", "shellcheck", "sudo"), "#!/bin/sh\n")}.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        (tmp_path / "venv/bin").mkdir(parents=True)
        # It says of itself that it is new, so that no other Python is looked for.
        python = '#!/bin/sh\ncase "$2" in *version_info*) exit 1;; esac\nexec python3 "$@"\n'
        (tmp_path / "venv/bin/python").write_text(python)
        (tmp_path / "venv/bin/python").chmod(0o755)
        environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv")}
        environment |= {"LIMIT_MINUTES": str(minutes), "FAILS": fails}
        return subprocess.run([tmp_path / ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_everything_runs_where_time_lasts(ci, tmp_path):
    ran = ci()
    assert ran.returncode == 0 and "=== all passed" in ran.stdout and "NOT TESTED" not in ran.stdout, ran
    called = (tmp_path / "called").read_text().splitlines()
    assert [words.split()[1] for words in called] == ["install", "check", "docs", "test", "test", "test", "test-all"]
    assert called[-1].endswith("-m thorough")


def test_slow_machine_leaves_out_further_sections(ci, tmp_path):
    ran = ci(minutes=-1)
    assert ran.returncode == 0, ran
    assert [
        line.split(": ")[1].split(".")[0] for line in ran.stdout.splitlines() if "=== NOT TESTED" in line
    ] == FURTHER
    assert (tmp_path / "called").read_text().count("make test") == 1


@pytest.mark.parametrize(
    "fails, section",
    [
        ("check*", "formatting, lint, types"),
        ("@(test|again)*", "tests"),
        ("@(test-all|again)*", "thorough tests"),
    ],
)
def test_a_failing_section_ends_it(ci, fails, section):
    ran = ci(fails=fails)
    assert ran.returncode == 1 and ran.stdout.splitlines()[-1].startswith(f"=== {section}: FAILED"), ran


def test_unexplained_skip_fails(ci):
    ran = ci(case="<skipped message='no moon'/>")
    assert ran.returncode == 1 and "unexplained skip of 1 tests: no moon" in ran.stderr
