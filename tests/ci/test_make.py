"""`make test` gives tests the environment of a new user."""

import os
import subprocess

import pytest

from tests.runtime.ranks import ROOT

CALLER = {"PYTHONUNBUFFERED": "1", "PIP_INDEX_URL": "http://nowhere", "PYTHONDONTWRITEBYTECODE": "1"}


def environment_of(target, *words, **more):
    """Return what the tests of a target get: its last command, with `env` in pytest's place."""
    shown = subprocess.run(
        ["make", "-n", target, "BIN=nowhere", *words], cwd=ROOT, env=os.environ | CALLER | more, capture_output=True
    )
    command = shown.stdout.decode().strip().splitlines()[-1].partition(" nowhere/python")[0]
    printed = subprocess.check_output(["sh", "-c", f"{command} env"], env=os.environ | CALLER | more, text=True)
    return dict(line.split("=", 1) for line in printed.splitlines())


@pytest.mark.parametrize("target", ["test", "test-all", "test-slurm", "again"])
def test_tests_get_nothing_of_the_machine_s_settings(target):
    assert not CALLER.keys() & environment_of(target).keys()


def test_tests_get_what_the_caller_asks_for():
    place = "/a folder/python"
    given = environment_of("test", "SETTINGS=LC_ALL=C", LLAMA_CPP_PYTHON=place, REAL_SLURM="require")
    assert (given["LLAMA_CPP_PYTHON"], given["REAL_SLURM"], given["LC_ALL"]) == (place, "require", "C")
    assert given["HOME"] == os.environ["HOME"]


def test_slurm_starts_only_on_request(monkeypatch):
    monkeypatch.delenv("REAL_SLURM", raising=False)
    assert environment_of("test-all")["REAL_SLURM"] == "off"
    assert environment_of("test-slurm")["REAL_SLURM"] == "require"
