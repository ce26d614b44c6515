"""The mutation tool tells what tests notice from what they do not, and leaves the files it was given alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("mutate")  # its processes start once, not once a worker
MUTATE = ROOT / "scripts" / "mutate.py"
MODULE = """\
def share(part, whole):
    if whole == 0:
        raise ValueError(f"no share of nothing: {part}. Give a whole.")
    return part / whole
"""
TEST = """\
import subprocess
import sys

def test_share_in_a_process_of_its_own():
    program = "from toy.shares import share; assert share(1, 2) == 0.5"
    subprocess.run([sys.executable, "-c", program], env={}, check=True)

def test_nothing():
    pass
"""


class Toy:
    """A repository of one module and two tests."""

    def __init__(self, root):
        self.root = root
        for name, text in {"toy/__init__.py": "", "toy/shares.py": MODULE, "tests/test_shares.py": TEST}.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)

    def mutate(self, *options):
        command = [sys.executable, MUTATE, "toy", "--root", self.root, "--sample", "9", "--preload", *options]
        return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    toy = Toy(tmp_path_factory.mktemp("toy"))
    return toy.root, toy.mutate(), toy.mutate()


def outcomes(root):
    lines = (root / "build/mutation/results-0.jsonl").read_text().splitlines()
    return {record["line"]: record for record in map(json.loads, lines)}


def test_subprocess_coverage_selects_the_killing_test(toy):
    root, done, _ = toy
    record = outcomes(root)[4]
    assert record["status"] == "noticed", done.stderr
    assert "test_share_in_a_process_of_its_own" in record["by"]


def test_dropped_raise_survives_and_is_printed(toy):
    root, done, _ = toy
    assert outcomes(root)[3]["status"] == "survived"
    assert done.returncode == 1
    assert '-        raise ValueError(f"no share of nothing' in done.stdout
    assert "+        pass" in done.stdout


def test_user_files_are_never_changed(toy):
    root, _, _ = toy
    assert (root / "toy/shares.py").read_text() == MODULE
    assert (root / "build/mutation/tree/toy/shares.py").read_text() == MODULE


def test_second_run_reuses_map_and_results(toy):
    root, done, again = toy
    assert "tests passed" in done.stderr and again.stderr == ""
    assert again.stdout == done.stdout
    assert len(outcomes(root)) == 3


def test_later_run_continues_map_and_survivors(tmp_path):
    toy = Toy(tmp_path)
    (tmp_path / "alias").symlink_to("toy")
    test_here = "from alias.shares import share\n\ndef test_here():\n    share(1, 2)\n"
    (tmp_path / "tests/test_here.py").write_text(test_here)
    first = toy.mutate("--map-limit", "0", "--limit", "0")
    assert "test_shares.py: 1 of 1 tests passed, cut off" in first.stderr
    assert outcomes(tmp_path)[4]["status"] == "unfinished"
    assert list(outcomes(tmp_path)[4]["passed"]) == ["tests/test_here.py::test_here"]
    refuses = "import pytest\nfrom toy.shares import share\n\ndef test_refuses():\n"
    refuses += "    with pytest.raises(ValueError):\n        share(1, 0)\n"
    (tmp_path / "tests/test_refuses.py").write_text(refuses)
    second = toy.mutate()
    assert "test_shares.py: 2 of 2 tests passed" in second.stderr
    assert {outcomes(tmp_path)[line]["status"] for line in (3, 4)} == {"noticed"}


def test_documented_command_samples_the_package():
    printed = next(line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if "scripts/mutate.py" in line)
    words = printed.split("#")[0].split()[1:]
    listed = [subprocess.run([sys.executable, *words, "--list"], capture_output=True, cwd=ROOT) for _ in range(2)]
    assert listed[0].stdout == listed[1].stdout != b""
