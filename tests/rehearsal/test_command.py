"""`python -m benchmarks.rehearse` prints the step's time, launches, waits and memory."""

import re
import subprocess
import sys

import pytest

from benchmarks.rehearsal.requirements import why_not
from tests.runtime.ranks import ROOT, environment

pytestmark = [
    pytest.mark.xdist_group("rehearsal"),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]


def test_rehearse_prints_bound_waits_and_memory():
    words = ["blackmamba_1.5b", "model.pattern=ME", "--micro-batches", "1", "training.micro_batch=2"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rehearse", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("blackmamba_1.5b: rank 0 of 8, 1 micro-batches of 2 sequences, 2 layers")
    for heading in ("upper bound, before communication", "by part, H200", "the host waits", "memory, GiB"):
        assert heading in done.stdout
    (bound,) = (line for line in done.stdout.splitlines() if line.startswith("H200 SXM"))
    assert 5 < float(bound.split()[-1].rstrip("%")) < 80
    rows = dict(re.findall(r"^(none lower|all of them) +([\d.]+)%$", done.stdout, re.MULTILINE))
    assert float(rows["all of them"]) < float(rows["none lower"]) == float(bound.split()[-1].rstrip("%"))
