"""Time each kernel of a fused decoding step alone, and try other tilings of it.

A graph launches one kind of kernel for all layers, whose weights together do not fit into the L2 cache. So a kernel
reads its weights from memory, as in a step. Its time includes what its launch costs.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_kernels import Machine
from benchmarks.gpu_step import clocked
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.captured import Graph
from megatron_blackmamba.inference.weights import Weights
from megatron_blackmamba.ops.decoding import triton as triton_decoding
from megatron_blackmamba.ops.decoding.triton import Launch, Tiling

REPEATS = 20
CHANGES: dict[str, list[dict[str, int]]] = {
    "one": [
        {"rows": 4}, {"rows": 8}, {"rows": 16}, {"rows": 32}, {"warps": 4}, {"warps": 8}, {"rows": 4, "warps": 4},
        {"rows": 8, "warps": 4}, {"rows": 16, "warps": 4}, {"rows": 8, "block": 256}, {"rows": 4, "block": 256},
    ],
    "rows": [
        {"rows": 16}, {"rows": 32}, {"rows": 64}, {"block": 64}, {"block": 256, "stages": 3}, {"stages": 3},
        {"stages": 5}, {"warps": 2}, {"warps": 8}, {"tokens": 16}, {"tokens": 32}, {"tokens": 64},
        {"rows": 32, "block": 64}, {"rows": 64, "block": 64}, {"rows": 128, "block": 64, "warps": 8},
    ],
}  # fmt: skip
"""Changes to the tiling of a product, for one sequence and for several."""


def show(weights: Weights, rows: list[int], machine: Machine | None, seconds: float) -> None:
    if machine is None:
        raise SystemExit("gpu_generation: --kernels needs a GPU; --launches needs none")
    decoder = Decoder(weights)
    for number in rows:
        print(f"rows {number}: a step takes {_ms(decoder, number):.4f} ms")
        with mock.patch.object(triton_decoding, "OVERLAP", False):
            print(f"  {_ms(decoder, number):.4f} ms if no kernel starts before the one before it has ended", flush=True)
        names = _names(decoder, number)
        alone = {name: _ms(decoder, number, name) for name in names}
        for name, ms in sorted(alone.items(), key=lambda item: -item[1]):
            print(f"  {ms:.4f} ms for {names[name]:2} launches, {1e3 * ms / names[name]:6.2f} us each: {name}")
        print(f"  {sum(alone.values()):.4f} ms together", flush=True)
        _tilings(decoder, number, alone, seconds)


def _tilings(decoder: Decoder, rows: int, alone: dict[str, float], seconds: float) -> None:
    """Try other tilings of the slowest kernels first, until the time is over."""
    until = time.monotonic() + seconds
    how = triton_decoding.tilings(rows)
    parts = {name: part for name in alone if (part := _part(name))}
    seen: dict[str, set[Tiling]] = {part: {how[part]} for part in how}
    for name in sorted(parts, key=lambda name: -alone[name]):
        part = parts[name]
        for change in CHANGES["one" if rows == 1 else "rows"]:
            other = replace(how[part], **change)
            if other in seen[part] or time.monotonic() > until:
                continue
            seen[part].add(other)
            with mock.patch.dict(how, {part: other}):
                try:
                    names = [each for each in parts if parts[each] == part]
                    found = ", ".join(
                        f"{each} {_ms(decoder, rows, each):.4f} (was {alone[each]:.4f})" for each in names
                    )
                except Exception as error:  # too much shared memory, or a tile that Triton refuses
                    found = f"{type(error).__name__}: {str(error)[:80]}"
            print(f"  {part} {change}: {found}", flush=True)


def _part(name: str) -> str | None:
    """Return the product whose tiling a kernel has."""
    if name.endswith("head"):
        return "head"
    down = name.startswith("add") and name.endswith("of an expert")
    return "down" if down else {"mamba_in": "in", "add_prod": "out", "gated_in": "gated"}.get(name[:8])


def _label(kernel: Any, constants: dict[str, Any]) -> str:
    routed = " of an expert" if constants.get("ROUTED") else ""
    return kernel.fn.__name__ + (" head" if constants.get("ADD") is False else routed)


def _names(decoder: Decoder, rows: int) -> dict[str, int]:
    """Return the kernels of a step, and how often each is launched."""
    names: dict[str, int] = {}

    def count(launch: Launch, kernel: Any, *arguments: Any, **constants: Any) -> None:
        names[_label(kernel, constants)] = names.get(_label(kernel, constants), 0) + 1

    with mock.patch.object(Launch, "__call__", count):
        decoder.step(decoder.start(rows), torch.zeros(rows, dtype=torch.long, device=decoder.weights.device))
    return names


@contextmanager
def _only(name: str | None, decoder: Decoder, rows: int) -> Iterator[None]:
    """Launch one kind of kernel alone, with evenly chosen experts, or all as they are."""
    launch, device = Launch.__call__, decoder.weights.device
    generator = torch.Generator(device=device).manual_seed(0)
    expert_B = torch.randint(decoder.config.experts or 1, (rows,), device=device, generator=generator).int()

    def selected(self: Launch, kernel: Any, *arguments: Any, **constants: Any) -> None:
        if _label(kernel, constants) == name:
            arguments = tuple(
                expert_B if isinstance(each, torch.Tensor) and (each.dtype, each.dim()) == (torch.int32, 1) else each
                for each in arguments
            )
            launch(self, kernel, *arguments, **constants)

    with nullcontext() if name is None else mock.patch.object(Launch, "__call__", selected):
        yield


def _ms(decoder: Decoder, rows: int, name: str | None = None) -> float:
    """Return the median time of a captured step, or of one kind of its kernels."""
    state = decoder.start(rows)
    with _only(name, decoder, rows):
        if name is not None:
            with mock.patch.object(Decoder, "logits_of_stream", _without_norm):
                graph = Graph(decoder, state, None)
        else:
            graph = Graph(decoder, state, None)
    graph.tokens_B.random_(decoder.config.vocab_size)
    return statistics.median(clocked(graph.cuda_graph.replay)[0] for _ in range(REPEATS))


def _without_norm(decoder: Decoder, stream_TD: torch.Tensor) -> torch.Tensor:
    return decoder.logits(stream_TD)
