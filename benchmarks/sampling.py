"""Time to draw the next token from 50,304 logits, beside transformers' filters and `torch.multinomial`.

    python -m benchmarks.sampling [--rows 1 64] [--repeats 15] [--threads 1] [--device cuda]

Both take turns. Logits are normal with a deviation of 5, which leaves about a hundred tokens above 95%.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor
from transformers.generation import logits_process

from benchmarks._common import cpu_model
from megatron_blackmamba.inference import Sampling
from megatron_blackmamba.inference.sampling import Sampler

VOCABULARY = 50_304
OPTIONS: list[dict[str, float | int]] = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95}]
OPTIONS += [{"temperature": 0.8, "top_k": 50}]


def theirs(logits_BV: Tensor, options: dict[str, float | int]) -> Tensor:
    """Return tokens as transformers' `generate` draws them."""
    if not options:
        return logits_BV.argmax(dim=-1)
    filters = [logits_process.TemperatureLogitsWarper(float(options["temperature"]))]
    filters += [logits_process.TopKLogitsWarper(int(options["top_k"]))] if "top_k" in options else []
    filters += [logits_process.TopPLogitsWarper(float(options["top_p"]))] if "top_p" in options else []
    for each in filters:
        logits_BV = each(None, logits_BV)
    return torch.multinomial(logits_BV.softmax(dim=-1), 1)[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    print(f"{cpu_model() if device.type == 'cpu' else torch.cuda.get_device_name(device)}, {asked.threads} thread(s)")
    for rows in asked.rows:
        random = torch.Generator().manual_seed(0)
        logits_BV = (5 * torch.randn(rows, VOCABULARY, generator=random)).to(device)
        for options in OPTIONS:
            sampler = Sampler(Sampling(**options), [[row] for row in range(rows)], VOCABULARY, device)  # type: ignore[arg-type]
            ways = {"ours": lambda: sampler(logits_BV), "transformers": lambda: theirs(logits_BV, options)}  # noqa: B023
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(asked.repeats):
                for name, draw in ways.items():
                    begun = time.perf_counter()
                    draw().tolist()
                    seconds[name].append(time.perf_counter() - begun)
            took = ", ".join(f"{name} {statistics.median(each) * 1e3:.2f} ms" for name, each in seconds.items())
            print(f"{rows} row(s), {options or 'greedy'}: {took}")


if __name__ == "__main__":
    main()
