"""Keep a small checkpoint of this version, for later ones to resume: `python -m tests.checkpoint.release`."""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch

from megatron_blackmamba import __version__
from megatron_blackmamba.checkpoint import CheckpointReader
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.formats.step_records import metrics_so_far

RELEASED = Path(__file__).parent / "released"
SAVED = 5


def keep(folder: Path = RELEASED, version: str = __version__) -> None:
    """Train `run.yaml`, and keep its checkpoint with the weights' digests and the losses after it."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "megatron_blackmamba", "train", str(RELEASED / "run.yaml")]
        subprocess.run([*command, "folder=runs", "name=run"], cwd=scratch, check=True)  # no path of this machine
        run = RunFolder(Path(scratch) / "runs/run")
        losses = [record["loss"] for record in metrics_so_far(run.metrics)]
        found = {"losses_after": losses[SAVED:], "weights": digests(run.checkpoint(SAVED))}
        (folder / f"{version}.json").write_text(json.dumps(found, indent=2) + "\n")
        with tarfile.open(folder / f"{version}.tar.xz", "w:xz") as archive:
            archive.add(run.checkpoint(SAVED), run.checkpoint(SAVED).name)


def digests(checkpoint: Path) -> dict[str, str]:
    """Return a fingerprint of the bits of every weight."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in CheckpointReader(checkpoint).tensors()
    }


if __name__ == "__main__":
    keep()
