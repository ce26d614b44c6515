"""Generation on one GPU: time per step and per prompt, beside the time that reading the weights takes.

    python -m benchmarks.gpu_generation [MODEL] [--rows 1 8 64 256] [--prompt 2048] [--repeats 100] [--json FILE]

A step generates one token for each row, in bf16 and captured as a CUDA graph. The limit is the time to read, at the
measured copy bandwidth, the weights that a step of one row needs. Prompts of all rows are read in parallel, if they
have at most 131,072 tokens together. Weights are random. Without a GPU there is no limit.
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
from megatron_blackmamba.inference.captured import stepper
from megatron_blackmamba.inference.weights import pack

WARM_UP = 2
MOST_PROMPT_TOKENS = 2**17


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="blackmamba_1.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    machine = Machine() if torch.cuda.is_available() else None
    device = "cpu" if machine is None else "cuda"
    decoder = Decoder(pack(random_model(load(options.model).model), torch.bfloat16, device))
    limit_ms = None if machine is None else decoder.weights.bytes_a_token / machine.bytes_a_ms
    rows = [measure(decoder, number, options.prompt, options.repeats) for number in options.rows]
    result = {"machine": machine.describe() if machine else _common.machine(), "limit_ms": limit_ms, "rows": rows}
    print(json.dumps(result["machine"]), f"limit of a step of one row: {limit_ms} ms", _common.table(rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure(decoder: Decoder, rows: int, prompt: int, repeats: int) -> dict[str, Any]:
    """Return a row of the table: steps of some sequences at once, and their prompts."""
    device = decoder.weights.device
    step = stepper(decoder, state := decoder.start(rows))
    token = state.last_B.new_ones(rows)
    step_ms = median_ms(lambda: token.copy_(step(token).argmax(dim=-1)), repeats)
    prompt_ms = None
    if rows * prompt <= MOST_PROMPT_TOKENS:
        tokens = torch.randint(decoder.config.vocab_size, (rows, prompt), device=device)
        prompt_ms = median_ms(lambda: decoder.read(decoder.start(rows), tokens), max(1, repeats // 20))
    return {
        "rows": rows,
        "step ms": step_ms,
        "tokens/s": 1e3 * rows / step_ms,
        "prompt ms": prompt_ms,
        "prompt tokens/s": None if prompt_ms is None else 1e3 * rows * prompt / prompt_ms,
    }


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    return statistics.median([clocked(call)[0] for _ in range(WARM_UP + repeats)][WARM_UP:])


if __name__ == "__main__":
    main()
