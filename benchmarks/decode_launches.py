"""Count the kernels of a decoding step without a GPU, and bound its time.

The step runs on tensors without data. PyTorch's operations are counted except views. Fused kernels are counted where
they would be launched. `least ms` adds the bytes at an H200's copy bandwidth and a fixed time for each kernel.
`decode_model` models each kernel.
"""

import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import _common
from megatron_blackmamba.config import ModelConfig

BYTES_A_MS, LAUNCH_MS = 4.24e9, 0.0022
"""Measured on an H200; assumed from the start of one captured kernel to the first bytes of the next."""
VIEWS = frozenset(
    {"empty", "empty_like", "new_empty", "lift_fresh", "expand", "detach", "alias", "_unsafe_view", "split"}
)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        if not function.is_view and name not in VIEWS:
            self.kernels[name] += 1
        return result


def table(config: ModelConfig, rows: list[int]) -> str:
    """Return a table of the kernels and the modelled time of a step, of some numbers of rows."""
    os.environ["TRITON_INTERPRET"] = "1"  # so that the Triton kernels are chosen on this machine; none of them runs
    from benchmarks.gpu_generation import bytes_a_step
    from megatron_blackmamba.inference import Decoder
    from megatron_blackmamba.inference.weights import pack
    from megatron_blackmamba.interchange.canonical import Canonical, Entry, shapes

    entries = {
        name: Entry(shape, torch.bfloat16, lambda shape=shape: torch.empty(shape, device="meta"))
        for name, shape in shapes(config).items()
    }
    weights = pack(Canonical(config, entries, "no data"), torch.bfloat16, "meta")
    found = []
    for number in rows:
        row: dict[str, Any] = {"rows": number}
        for name, fused in (("layers", False), ("fused", True)):
            row[f"{name} kernels"] = sum(kernels(Decoder(weights, fused=fused), number).values())
        moved_ms = bytes_a_step(Decoder(weights), number) / BYTES_A_MS
        row |= {"limit ms": moved_ms, "least ms": moved_ms + LAUNCH_MS * row["fused kernels"]}
        found.append(row)
    return _common.table(found)


def kernels(decoder: Any, rows: int) -> Counter[str]:
    """Return the kernels of one step by name."""
    from megatron_blackmamba.ops import decoding
    from megatron_blackmamba.ops.decoding import triton as triton_decoding

    state = decoder.start(rows)
    tokens_B = torch.zeros(rows, dtype=torch.long, device="meta")

    def count(launch: object, kernel: Any, *arguments: Any, **constants: Any) -> None:
        counting.kernels[kernel.fn.__name__] += 1

    with mock.patch.object(triton_decoding.Launch, "__call__", count), torch.no_grad(), Counting() as counting:
        logits_BV = type(decoder).step.__wrapped__(decoder, state, tokens_B)  # inference mode would hide operations
        if not decoder.fused or decoding.likeliest(logits_BV) is None:
            logits_BV.argmax(dim=-1)
    return counting.kernels
