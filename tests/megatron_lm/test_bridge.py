"""Our model in Megatron-Bridge's own loop: examples/pretrain_in_megatron_bridge.py, beside a loop in plain PyTorch."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_blackmamba import build, load_config
from megatron_blackmamba.runtime.ports import free_port
from tests.thorough import thorough

ROOT = Path(__file__).resolve().parents[2]
STEPS, RATE = 5, 1e-3
MODEL = ["data.sequence_length=64", "data.kind=synthetic", "training.precision=fp32"]
BATCH = ["training.global_batch=8", "training.micro_batch=4"]
LOOP = [f"train.train_iters={STEPS}", f"optimizer.lr={RATE}", "dist.distributed_backend=gloo"]
LOSS = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+)")


@thorough
@pytest.mark.skipif(not find_spec("megatron.bridge"), reason="megatron-bridge is not installed")
def test_five_steps_equal_plain_pytorch(tmp_path):
    launch = ["torch.distributed.run", "--nproc-per-node", "1", "--master-port", str(free_port())]
    script = [str(tmp_path), str(ROOT / "examples/pretrain_in_megatron_bridge.py"), "tiny", *MODEL, *BATCH, "--", *LOOP]
    command = [sys.executable, "-m", *launch, "-m", "tests.megatron_lm.bridge_on_cpu", *script]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    logged = {int(step): float(loss) for step, loss in LOSS.findall(done.stdout)}
    assert done.returncode == 0 and logged, (done.stdout + done.stderr)[-3000:]
    model = build(load_config("tiny", MODEL))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.999))
    batches = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    assert len(batches) == 2 * STEPS
    expected = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        half = [model(tokens, labels).mean() for tokens, labels in batches[2 * step : 2 * step + 2]]
        (sum(half) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected[step + 1] = sum(half).item() / 2
    assert logged == pytest.approx(expected, abs=2e-6)
