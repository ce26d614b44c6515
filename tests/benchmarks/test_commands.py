"""Each benchmark runs at a small size: what it calls may change, and nothing else would notice."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import thorough

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "attention": "--repeats 1 --lengths 64 --heads 2 --kv-heads 1 --channels 8",
    "batches": "--model tiny --rows 1 --layers 2 --repeats 1",
    "checks": "tiny --repeats 1",
    "conversion": "--model tiny --no-verify",
    "exports": "--model tiny --processes 1",
    "generation": "--model tiny --lengths 4 --repeats 1 --layers 2",
    "long_sequences": "tiny --repeats 1 --lengths 64 --contexts 1 2",
    "mixers": "--repeats 1 --hidden 128 --length 32",
    "sampling": "--repeats 1 --rows 2",
    "selective_scan": "--repeats 1 --inner 16 --length 32 --without-slow-peers",
    "sinkhorn": "--repeats 1 --tokens 64 --std 1",
    "ssd": "--repeats 1 --inner 128 --length 64",
    "step_length": "tiny --repeats 1 --lengths 64",
    "step_profile": "tiny --repeats 1 --steps 1",
    "train_step": "tiny --repeats 1",
}


@thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_benchmark_runs_at_a_small_size(name, tmp_path):
    words = [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name].split()]
    done = subprocess.run(
        words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
