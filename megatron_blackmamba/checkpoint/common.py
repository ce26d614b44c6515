"""The files that megatron-core keeps beside the tensors: plain values, and the one that marks a checkpoint.

Written here for every version of it: 0.19 alone would pickle the values among the tensors, where 0.16 looks in vain.
"""

import io
from pathlib import Path
from typing import Any

import torch

from megatron_blackmamba.formats import atomic

VALUES = "common.pt"
FORMAT_FILE = "metadata.json"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write(folder: Path, values: dict[str, Any]) -> None:
    """Write both files, each whole or not at all."""
    buffer = io.BytesIO()  # torch, writing to a full disk, would raise something else than OSError
    torch.save(values, buffer)
    atomic.write_bytes(folder / VALUES, buffer.getvalue())
    atomic.write_json(folder / FORMAT_FILE, FORMAT)
