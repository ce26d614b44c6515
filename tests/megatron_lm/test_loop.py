"""Our model in Megatron-LM's own loop: examples/pretrain_in_megatron_lm.py, beside a loop in plain PyTorch.

MEGATRON_LM_SOURCE names a clone of Megatron-LM at the release of the installed megatron-core, such as core_v0.16.1.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_blackmamba import build, load_config
from megatron_blackmamba.runtime.ports import free_port
from tests.thorough import thorough

pytestmark = thorough

ROOT = Path(__file__).resolve().parents[2]
STEPS, RATE = 10, 1e-3
MODEL = ["data.sequence_length=64", "data.kind=synthetic", "training.precision=fp32"]
LOOP = [
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "511", "--transformer-impl", "local"),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", str(STEPS), "--lr", str(RATE)),
    *("--distributed-backend", "gloo", "--eval-iters", "0", "--eval-interval", "100", "--log-interval", "1"),
    *("--weight-decay", "0", "--no-gradient-accumulation-fusion"),
]
LOSS = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+)")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Megatron-LM without its own megatron-core, so that the installed one is used."""
    clone = os.environ.get("MEGATRON_LM_SOURCE")
    if not clone:
        pytest.skip("MEGATRON_LM_SOURCE names no clone")
    view = tmp_path_factory.mktemp("source")
    (view / "megatron").mkdir()
    for path in [*Path(clone).glob("*.py"), *Path(clone, "megatron").iterdir()]:
        if path.name != "core":
            (view / path.relative_to(clone)).symlink_to(path)
    return view


def losses(source, record, ranks=1, model=(), loop=()):
    """Train in Megatron-LM's loop, and return the loss that it logs of each step."""
    record.mkdir(exist_ok=True)
    script = [
        str(record),
        str(ROOT / "examples/pretrain_in_megatron_lm.py"),
        "tiny",
        *MODEL,
        *model,
        "--",
        *LOOP,
        *loop,
    ]
    launch = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    command = [sys.executable, "-m", *launch, "-m", "tests.megatron_lm.on_cpu", *script]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{source}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=record, capture_output=True, text=True)
    found = {int(step): float(loss) for step, loss in LOSS.findall(done.stdout)}
    assert done.returncode == 0 and found, (done.stdout + done.stderr)[-3000:]
    return found


@pytest.fixture(scope="module")
def alone(source, tmp_path_factory):
    record = tmp_path_factory.mktemp("alone")
    return losses(source, record), record


def test_ten_steps_equal_plain_pytorch(alone):
    logged, record = alone
    model = build(load_config("tiny", MODEL))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.999))
    batches = [torch.load(path) for path in sorted(record.glob("0_*.pt"))]
    assert len(batches) == 2 * STEPS and sorted(logged) == list(range(1, STEPS + 1))
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        half = [model(tokens, labels).mean() for tokens, labels in batches[2 * step : 2 * step + 2]]
        (sum(half) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(sum(half).item() / 2)
    expected[1] = (expected[0] + expected[1]) / 2  # Megatron-LM logs the mean of the first two steps of a job
    assert logged == pytest.approx(dict(enumerate(expected, 1)), abs=2e-6)


@pytest.mark.parametrize(
    ("model", "loop"), [(["parallel.expert=2"], []), (["parallel.tensor=2"], ["--sequence-parallel"])]
)
def test_two_ranks_have_the_losses_of_one(model, loop, alone, source, tmp_path):
    assert losses(source, tmp_path / "two", 2, model, loop) == pytest.approx(alone[0], abs=2e-6)


def test_bf16_follows_fp32_on_the_distributed_optimizer(alone, source, tmp_path):
    loop = ["--bf16", "--use-distributed-optimizer"]
    assert losses(source, tmp_path / "bf16", model=["training.precision=bf16"], loop=loop) == pytest.approx(
        alone[0], abs=5e-3
    )


def test_its_checkpoint_resumes_on_another_layout(alone, source, tmp_path):
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "5"]
    first = losses(source, tmp_path / "one", 2, ["parallel.expert=2"], [*save, "--exit-interval", "5"])
    again = losses(source, tmp_path / "two", loop=[*save, "--load", str(tmp_path / "saved")])
    del again[7]  # the mean of the first two steps of this job
    both = first | again
    assert both == pytest.approx({step: alone[0][step] for step in both}, abs=2e-6)
