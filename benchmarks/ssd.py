"""The SSD scan of Mamba-2, forward and forward + backward, beside transformers' own and the scan of Mamba-1.

    python -m benchmarks.ssd [--batch 1 --inner 2304 --length 2048 --state 128 --head 64 --groups 1] [--json]

The defaults are one sequence of the 1.5B model's width. transformers computes in chunks of 256 tokens, its default, on
its path without CUDA kernels. Mamba-1 has as many channels with its usual 16 states. It has no gate here, because
Mamba-2 has its own outside the scan.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks import _common
from megatron_blackmamba.ops.selective_scan import selective_scan
from megatron_blackmamba.ops.ssd import ssd

Inputs = dict[str, Tensor]
MAMBA1 = "Mamba-1's scan, 16 states"


def main() -> None:
    parser = _common.arguments(__doc__)
    for name, default in (("batch", 1), ("inner", 2304), ("length", 2048), ("state", 128), ("head", 64), ("groups", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    inputs, of_mamba1 = scan_inputs(options), mamba1_inputs(options)
    ways: dict[str, tuple[Callable[[Inputs], Tensor], Inputs]] = {"ours": (ours, inputs)}
    if find_spec("transformers"):
        from transformers.models.mamba2 import modeling_mamba2

        if hasattr(modeling_mamba2, "mamba2_chunk_scan"):
            ways["transformers"] = (partial(transformers_scan, modeling_mamba2.mamba2_chunk_scan), inputs)
    ways[MAMBA1] = (mamba1, of_mamba1)
    shape = f"B={options.batch} I={options.inner} L={options.length} N={options.state} P={options.head} float32"
    tables = {}
    for title, run in (("forward", forward), ("forward + backward", both)):
        calls = {name: partial(run, way, given) for name, (way, given) in ways.items()}
        seconds = _common.interleaved(calls, repeats=options.repeats, device=options.device)
        tables[f"{title}, {shape}"] = rows(seconds)
    _common.show({"machine": _common.machine("transformers"), "tables": tables}, options.json)


def scan_inputs(options: Any) -> Inputs:
    B, L, H, G, N = options.batch, options.length, options.inner // options.head, options.groups, options.state
    shapes = {"x": (B, L, H, options.head), "dt": (B, L, H), "B": (B, L, G, N), "C": (B, L, G, N)}
    inputs = random(shapes) | {"A": -torch.linspace(1.0, 16.0, H), "D": torch.ones(H), "bias": torch.full((H,), -4.0)}
    return {name: tensor.to(options.device).requires_grad_() for name, tensor in inputs.items()}


def mamba1_inputs(options: Any) -> Inputs:
    B, L, I, N = options.batch, options.length, options.inner, 16
    inputs = random({"x": (B, L, I), "dt": (B, L, I), "B": (B, L, N), "C": (B, L, N)})
    inputs |= {"A": -torch.arange(1.0, N + 1).repeat(I, 1), "D": torch.ones(I), "bias": torch.full((I,), -4.0)}
    return {name: tensor.to(options.device).requires_grad_() for name, tensor in inputs.items()}


def random(shapes: dict[str, tuple[int, ...]]) -> Inputs:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def ours(x: Inputs) -> Tensor:
    y: Any = ssd(x["x"], x["dt"], x["A"], x["B"], x["C"], x["D"], dt_bias_H=x["bias"])
    return y


def mamba1(x: Inputs) -> Tensor:
    y: Any = selective_scan(x["x"], x["dt"], x["A"], x["B"], x["C"], x["D"], delta_bias_I=x["bias"])
    return y


def transformers_scan(scan: Callable[..., Tensor], x: Inputs) -> Tensor:
    options = {"chunk_size": 256, "D": x["D"], "dt_bias": x["bias"], "dt_softplus": True}
    return scan(x["x"], x["dt"], x["A"], x["B"], x["C"], **options)


def forward(way: Callable[[Inputs], Tensor], inputs: Inputs) -> None:
    with torch.no_grad():
        way(inputs)


def both(way: Callable[[Inputs], Tensor], inputs: Inputs) -> None:
    y = way(inputs)
    torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y))


def rows(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    first = _common.median(next(iter(seconds.values())))
    return [
        {"": name, "ms": 1e3 * _common.median(runs), "times the first": _common.median(runs) / first, "runs": len(runs)}
        for name, runs in seconds.items()
    ]


if __name__ == "__main__":
    main()
