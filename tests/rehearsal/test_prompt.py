"""`python -m benchmarks.rehearse_prompt` counts what reading a prompt launches; the host's launches bound its time."""

import subprocess
import sys

import pytest

from benchmarks.rehearsal.requirements import why_not
from tests.runtime.ranks import ROOT, environment
from tests.thorough import thorough

pytestmark = [
    pytest.mark.xdist_group("rehearsal"),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
ENDS = 5
"""Launches of a prompt outside its layers."""


@thorough
def test_prompt_launches_as_little_as_training():
    """Forward, a pair of layers takes 33 launches in training; a prompt also takes in and leaves states."""
    words = ["blackmamba_1.5b", "model.pattern=ME", "--rows", "1"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rehearse_prompt", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    launches = int(done.stdout.splitlines()[2].split()[1])
    assert launches - ENDS <= 35
