"""The runtime with a GPU: the patches for machines without CUDA stay away, and a model trains a few steps."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

PROBE = """
import json, torch
names = ("current_device", "synchronize", "Stream", "Event", "current_stream")
before = {name: getattr(torch.cuda, name) for name in names}
factories = (torch.empty, torch.zeros, torch.Tensor.cuda, torch.Tensor.type)
from megatron_blackmamba.engine import changes
applied = changes.install()
print(json.dumps({
    "applied": applied,
    "for_missing_cuda": [change.name for change in changes.CHANGES if change.needed is changes.without_cuda],
    "untouched": all(getattr(torch.cuda, name) is value for name, value in before.items())
    and factories == (torch.empty, torch.zeros, torch.Tensor.cuda, torch.Tensor.type),
}))
"""


def test_missing_cuda_patches_are_not_applied():
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["for_missing_cuda"] and not set(seen["applied"]) & set(seen["for_missing_cuda"])
    assert seen["untouched"]


def blackmamba(folder, *arguments):
    command = [sys.executable, "-m", "megatron_blackmamba", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_tiny_model_learns_on_the_gpu(tmp_path, precision):
    blackmamba(
        tmp_path,
        *("train", "tiny", f"training.precision={precision}", "training.tokens=40960", "training.evaluate_every=0"),
        f"folder={tmp_path}",
    )
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines() if '"loss"' in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.isfinite(torch.tensor(losses)))


def test_run_is_planned_resumed_and_exported_beside_gpu(tmp_path):
    """Commands that build a model elsewhere, on `meta` or the CPU, in a process that sees the GPU."""
    run = ("train", "tiny", "training.tokens=20480", "training.evaluate_every=0", f"folder={tmp_path}")
    assert "GiB" in blackmamba(tmp_path, "plan", "tiny", "--nodes", 1, "--gpus-per-node", 1)
    blackmamba(tmp_path, *run, "training.stop_after_steps=5")
    blackmamba(tmp_path, *run)
    blackmamba(tmp_path, "export", "hf", tmp_path / "tiny", tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors").is_file()
