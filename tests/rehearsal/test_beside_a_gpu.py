"""A process that sees a GPU builds models on `meta` or the CPU: to count, to plan, and to check an export."""

import json
import subprocess
import sys

import pytest

from benchmarks.rehearsal.requirements import why_not
from tests.runtime.ranks import ROOT, environment

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

PROBE = """
from benchmarks.rehearsal import fake_cuda  # before torch
fake_cuda.become_gpu()
import json
import torch
from megatron_blackmamba.config import load
from megatron_blackmamba.interchange import through_megatron
from megatron_blackmamba.plan import estimate, gpus, parameters
from tests.reference import tiny
from tests.reference.canonical import canonical

asked = estimate.Asked(1, 8, gpus.KNOWN["h100"])
print(json.dumps({
    "counted": parameters.count(load("tiny")).total,
    "planned": [
        estimate.make_plan(load("tiny", overrides), asked).placed.seconds_per_step > 0
        for overrides in (["training.global_batch=64"], ["parallel.pipeline=2", "parallel.tensor=2"])
    ],
    "observed": list(through_megatron.observe(canonical(tiny()), torch.tensor([[1, 2, 3, 4]])).logits_BSV.shape),
}))
"""


def test_models_are_built_on_meta_and_the_cpu():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "counted": 492_688,
        "planned": [True, True],
        "observed": [1, 4, 64],
    }
