"""Tokens a second against the number of sequences: decoding a token at a time, and reading prompts.

    python -m benchmarks.batches [--rows 1 8 9 16 32 64] [--layers 6] [--dtypes bf16 fp32] [--prompt 128]

Random weights at the 1.5B width. All cases take turns, and CPU seconds are counted, so that what else runs meets all
alike. The last column is decoding's throughput over that of eight sequences. `ATEN_CPU_CAPABILITY`,
`ONEDNN_MAX_CPU_ISA` and `BLACKMAMBA_ISA` show what processors with fewer instructions do.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks._common import cpu_model
from benchmarks.generation import random_model
from megatron_blackmamba.config import load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.ops import library

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="blackmamba_1.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 9, 16, 32, 64])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt; 0 leaves reading out")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    config = load(arguments.model).model
    config = config.model_copy(update={"pattern": config.pattern[: arguments.layers]})
    print(f"{cpu_model()}, {torch.get_num_threads()} threads, kernels {library.isa()}, {config.layers} layers")
    for name in arguments.dtypes:
        decoder = Decoder(pack(random_model(config), DTYPES[name]))
        cases = {f"decode {rows}": (rows, decoding(decoder, rows)) for rows in arguments.rows}
        if arguments.prompt:
            cases["prompt"] = (arguments.prompt, reading(decoder, arguments.prompt))
        seconds = timed({case: call for case, (_, call) in cases.items()}, arguments.repeats)
        rates = {case: tokens / seconds[case] for case, (tokens, _) in cases.items()}
        print(f"\n{name}: tokens a CPU-second")
        for case, rate in rates.items():
            ratio = f"{rate / rates['decode 8']:6.2f}" if "decode 8" in rates and case != "prompt" else ""
            print(f"  {case:<12}{rate:10.1f}{ratio}")


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


def timed(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each call; the calls take turns."""
    taken: dict[str, list[float]] = {case: [] for case in calls}
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
