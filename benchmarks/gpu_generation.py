"""Generation on one GPU: time per step and per prompt, beside the time that the memory takes.

    python -m benchmarks.gpu_generation [MODEL] [--rows 1 8 64 256] [--prompt 2048] [--repeats 30] [--json FILE]
    python -m benchmarks.gpu_generation --launches     # needs no GPU: kernels and modelled time of a step
    python -m benchmarks.gpu_generation --kernels 1 8  # the time of each kernel alone

A step generates the likeliest token for each row, in bf16 and captured as a CUDA graph. Steps of each layer's own
operations and of the fused kernels take turns. The limit is the time for the weights that a step reads, its states and
its logits, at the measured copy bandwidth. Prompts of all rows are read in parallel, if they have at most 16,384
tokens together. Weights are random, so that rows choose experts evenly. Without a GPU there is no limit.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import _common
from benchmarks.generation import random_model
from benchmarks.gpu_kernels import Machine
from benchmarks.gpu_step import clocked
from megatron_blackmamba.config import load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.captured import likeliest, stepper
from megatron_blackmamba.inference.weights import pack

WARM_UP = 3
MOST_PROMPT_TOKENS = 2**14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="blackmamba_1.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=2048, metavar="TOKENS", help="0: measure no prompts")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--launches", action="store_true", help="count the kernels of a step, without a GPU")
    parser.add_argument("--kernels", type=int, nargs="+", metavar="ROWS", help="time every kernel alone")
    parser.add_argument("--seconds", type=float, default=30, help="with --kernels: for other tilings of a row count")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.launches:
        from benchmarks import decode_launches

        print(decode_launches.table(load(options.model).model, options.rows))
        return
    machine = Machine() if torch.cuda.is_available() else None
    device = "cpu" if machine is None else "cuda"
    weights = pack(random_model(load(options.model).model, device), torch.bfloat16, device)
    described = machine.describe() if machine else _common.machine()
    print(json.dumps(described), flush=True)
    if options.kernels:
        from benchmarks import decode_kernels

        decode_kernels.show(weights, options.kernels, machine, options.seconds)
        return
    decoders = {"layers": Decoder(weights, fused=False), "fused": Decoder(weights)}
    rows = []
    for number in options.rows:
        limit_ms = None if machine is None else bytes_a_step(decoders["fused"], number) / machine.bytes_a_ms
        rows.append(measure(decoders, number, limit_ms, options.repeats))
        print(json.dumps(rows[-1]), flush=True)
    print(_common.table(rows), flush=True)
    for row in rows:
        if options.prompt and row["rows"] * options.prompt <= MOST_PROMPT_TOKENS:
            row |= read(decoders["fused"], row["rows"], options.prompt)
            print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=1))


def measure(decoders: dict[str, Decoder], rows: int, limit_ms: float | None, repeats: int) -> dict[str, Any]:
    """Return a row of the table: steps of some sequences at once."""
    steps = {name: greedy(decoder, rows) for name, decoder in decoders.items()}
    taken = [clocked(*steps.values()) for _ in range(WARM_UP + repeats)][WARM_UP:]
    layers_ms, fused_ms = (statistics.median(times) for times in zip(*taken, strict=True))
    return {
        "rows": rows,
        "layers ms": layers_ms,
        "fused ms": fused_ms,
        "limit ms": limit_ms,
        "of the limit": None if limit_ms is None else f"{limit_ms / fused_ms:.0%}",
        "tokens/s": 1e3 * rows / fused_ms,
    }


def read(decoder: Decoder, rows: int, prompt: int) -> dict[str, float]:
    """Return the time of reading one prompt a row."""
    tokens = torch.randint(decoder.config.vocab_size, (rows, prompt), device=decoder.weights.device)
    reads = [clocked(lambda: decoder.read(decoder.start(rows), tokens))[0] for _ in range(2 * WARM_UP)][WARM_UP:]
    prompt_ms = statistics.median(reads)
    return {"prompt ms": prompt_ms, "prompt tokens/s": 1e3 * rows * prompt / prompt_ms}


def greedy(decoder: Decoder, rows: int) -> Callable[[], Any]:
    """Return a function that takes some sequences to their likeliest next tokens."""
    state = decoder.start(rows)
    step, token = stepper(decoder, state), state.last_B.new_ones(rows)
    generator = torch.Generator(device=token.device).manual_seed(0)
    token.random_(decoder.config.vocab_size, generator=generator)
    known_B = likeliest(step) if decoder.fused else None

    def once() -> None:
        logits_BV = step(token)
        token.copy_(logits_BV.argmax(dim=-1) if known_B is None else known_B)

    return once


def bytes_a_step(decoder: Decoder, rows: int) -> float:
    """Return the bytes that a step moves: weights, with the experts that so many rows choose evenly; states; logits."""
    weights, E = decoder.weights, max(1, decoder.config.experts or 1)
    experts = sum(
        (layer.fc1_EGD.nbytes + layer.fc2_EDF.nbytes) / E for layer in weights.layers if hasattr(layer, "fc1_EGD")
    )
    chosen = E * (1 - (1 - 1 / E) ** rows)
    states = 2 * rows * decoder.start(1).bytes
    return weights.bytes_a_token + (chosen - 1) * experts + states + 4 * rows * len(weights.head_VD)


if __name__ == "__main__":
    main()
