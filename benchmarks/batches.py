"""Tokens a second against the number of sequences: decoding a token at a time, and reading prompts.

    python -m benchmarks.batches [--rows 1 8 9 16 32 64] [--layers 6] [--dtypes bf16 fp32] [--prompt 128] [--peers]

Random weights at the 1.5B width. All cases take turns, and CPU seconds are counted, so that what else runs meets all
alike. The last column is decoding's throughput over that of eight sequences. `--peers` adds transformers' Mamba and its
Llama with a KV cache, both with as many parameters as ours uses per token. They decode behind eight tokens, where a KV
cache costs least. `ATEN_CPU_CAPABILITY`,
`ONEDNN_MAX_CPU_ISA` and `BLACKMAMBA_ISA` show what processors with fewer instructions do.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks._common import cpu_model
from benchmarks.generation import hf_stepper, mamba_model, random_model, transformer_model
from megatron_blackmamba.config import ModelConfig, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.ops import library

Case = TypeVar("Case", bound=Hashable)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="blackmamba_1.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 9, 16, 32, 64])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--prompt", type=int, nargs="*", default=[128], help="lengths of prompts, in tokens")
    parser.add_argument("--peers", action="store_true", help="compare with transformers' Mamba and Llama")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    config = load(arguments.model).model
    config = config.model_copy(update={"pattern": config.pattern[: arguments.layers]})
    print(f"{cpu_model()}, {torch.get_num_threads()} threads, kernels {library.isa()}, {config.layers} layers")
    for name in arguments.dtypes:
        decoder = Decoder(pack(random_model(config), DTYPES[name]))
        cases: dict[tuple[str, str, int], Callable[[], Any]] = {}
        for rows in arguments.rows:
            cases["ours", "decode", rows] = decoding(decoder, rows)
        for length in arguments.prompt:
            cases["ours", "prompt", length] = reading(decoder, length)
        if arguments.peers:
            cases |= peers(config, DTYPES[name], arguments.rows, arguments.prompt)
        seconds = timed(cases, arguments.repeats)
        print(f"\n{name}: tokens a CPU-second")
        for (model, what, number), spent in seconds.items():
            eight = seconds.get((model, what, 8))
            ratio = f"{number * eight / (8 * spent):6.2f}" if what == "decode" and eight else ""
            print(f"  {model:<12}{what} {number:<6}{number / spent:10.1f}{ratio}")


def peers(
    config: ModelConfig, dtype: torch.dtype, rows: list[int], prompts: list[int]
) -> dict[tuple[str, str, int], Callable[[], Any]]:
    """Return the cases of transformers' models."""
    longest = max([*prompts, 128])
    models = {"Mamba": mamba_model(config).to(dtype), "transformer": transformer_model(config, longest).to(dtype)}
    cases: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for name, model in models.items():
        for number in rows:
            cases[name, "decode", number] = hf_stepper(model, 8, number)
        for length in prompts:
            tokens = torch.arange(length)[None] * 31 % config.vocab_size
            cases[name, "prompt", length] = partial(model, tokens, use_cache=True, logits_to_keep=1)
    return cases


def decoding(decoder: Decoder, rows: int) -> Callable[[], None]:
    """Return a step of `rows` sequences at different tokens, so that they go to different experts."""
    state = decoder.start(rows)
    token = torch.arange(rows) * 97 + 5

    def step() -> None:
        token.copy_(decoder.step(state, token).argmax(dim=-1))

    return step


def reading(decoder: Decoder, length: int) -> Callable[[], None]:
    tokens = torch.arange(length)[None] * 31 % decoder.config.vocab_size
    return lambda: decoder.read(decoder.start(1), tokens)


def timed(calls: dict[Case, Callable[[], Any]], repeats: int) -> dict[Case, float]:
    """Return the median CPU seconds of each call; the calls take turns."""
    taken: dict[Case, list[float]] = {case: [] for case in calls}
    for repeat in range(repeats + 1):
        for case, call in calls.items():
            call()
            before = time.process_time()
            call()
            if repeat:
                taken[case].append(time.process_time() - before)
    return {case: statistics.median(times) for case, times in taken.items()}


if __name__ == "__main__":
    main()
