"""The paper's figure on one GPU: time per generated token by length, of four models of equal active size.

    python -m benchmarks.gpu_generation_lengths [--lengths 10 1000 4000 16000] [--plot FILE] [--json FILE]

Batch 1, bf16, random weights; every step is one captured graph. Mamba layers, experts and MLPs have fused kernels.
Attention has PyTorch's own, on a cache that holds the whole text already: nothing is copied when it grows.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.generation import by_length, random_model
from benchmarks.gpu_kernels import Machine
from benchmarks.gpu_step import clocked
from megatron_blackmamba.config import load
from megatron_blackmamba.inference import Decoder, State
from megatron_blackmamba.inference.captured import Graph
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.layers.attention import kind as attention
from megatron_blackmamba.layers.attention.decode import AttentionDecoding
from megatron_blackmamba.report.pictures import write_picture

MODELS = {
    "blackmamba_1.5b": "BlackMamba",
    "mamba_343m": "Mamba",
    "transformer_340m": "transformer",
    "transformer_moe_1.5b": "transformer with experts",
}
REPEATS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 1000, 4000, 16000])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_generation_lengths: needs a GPU; benchmarks.generation measures CPUs")
    torch.set_grad_enabled(False)
    machine = Machine()
    result: dict[str, Any] = {"machine": machine.describe(), "ms": {}, "limit ms": {}}
    print(json.dumps(result["machine"]), flush=True)
    for model in options.models:
        decoder = Decoder(pack(random_model(load(model).model, "cuda"), torch.bfloat16, "cuda"))
        result["limit ms"][model] = decoder.weights.bytes_a_token / machine.bytes_a_ms
        result["ms"][model] = {length: milliseconds(decoder, length) for length in options.lengths}
        times = ", ".join(f"{length:,}: {ms:.3f}" for length, ms in result["ms"][model].items())
        print(f"{MODELS[model]}: ms a token by length {times}; weights {result['limit ms'][model]:.3f}", flush=True)
        del decoder
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.plot:
        plot(result, options.plot)


def milliseconds(decoder: Decoder, length: int) -> float:
    """Return the time of one step behind a text of some tokens."""
    with mock.patch.object(AttentionDecoding, "step", step_on_full_cache):
        graph = Graph(decoder, state_at(decoder, length), None)
    times = [clocked(graph.cuda_graph.replay)[0] for _ in range(REPEATS + 3)][3:]
    return statistics.median(times)


def state_at(decoder: Decoder, length: int) -> State:
    """Return a state with random keys and values for a text and the token after it."""
    state = decoder.start(1)
    for how, memory in zip(decoder.how, state.memories, strict=True):
        if isinstance(how, AttentionDecoding):
            B, groups, _, C = memory[0].shape
            memory[:2] = (memory[0].new_empty(B, groups, length + 1, C).normal_() for _ in range(2))
    return state


def step_on_full_cache(
    self: AttentionDecoding, run: Decoder, layer: Any, memory: list[Tensor], x_BD: Tensor, inputs: Any
) -> Tensor:
    """Do what the layer's own step does, but write the token's key and value where the cache has a place for them."""
    model, (keys, values, _) = run.config, memory
    (B, groups, length, C), heads = keys.shape, model.attention.heads
    qkv = run.times(x_BD, layer.linear_qkv).view(B, 1, groups, -1, C).permute(0, 2, 3, 1, 4)
    q, k, v = (part.flatten(1, 2) for part in qkv.split([heads // groups, 1, 1], dim=2))
    if model.attention.rotary:
        cos_LC, sin_LC = attention._rotation(model, length - 1, 1, q.device)
        q, k = (x * cos_LC + attention._half_turned(x) * sin_LC for x in (q, k))
    keys[:, :, -1:], values[:, :, -1:] = k, v
    y = F.scaled_dot_product_attention(
        q.to(keys.dtype), keys, values, scale=model.attention_scale, enable_gqa=groups != heads
    )
    return run.times(y.transpose(1, 2).flatten(1).float(), layer.linear_proj)


def plot(result: dict[str, Any], path: Path) -> None:
    rows = [(MODELS[model], [int(length) for length in row], [*row.values()]) for model, row in result["ms"].items()]
    bound = ("reading BlackMamba's weights", result["limit ms"]["blackmamba_1.5b"])
    write_picture(path, [by_length(f"Generation, batch 1, bf16: {result['machine']['device']}", rows, bound)])


if __name__ == "__main__":
    main()
