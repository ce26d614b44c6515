"""Time the selective scan, forward and backward, beside other implementations and the limit of the machine.

    python -m benchmarks.selective_scan [--batch 1 --inner 2304 --length 2048 --state 16 --dtype float32] [--json]

The defaults are one sequence of the 1.5B model, with softplus, skip and gate. Peers, where installed:

- transformers: mamba_selective_scan of transformers 5, its path without CUDA kernels. Forward + backward is timed on
  256 tokens and scaled by the length. This is a lower bound: its backward grows with the square of the length.
- mambapy: its parallel scan, with softplus, skip and gate around it
- mamba_ssm: its CUDA kernel (GPUs only)

On a CPU the peers spend much of their time on new pages that the kernel clears, since PyTorch returns freed memory.
With --keep-memory they keep it, as our training runs do; the slow peers gain most.

The limit is the time for the exponentials of the scan, at the rate of this machine in a loop that does nothing else.
A channel and token needs N + 2 exponentials forward, and 2 N + 6 forward + backward.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _common
from megatron_blackmamba.ops import library
from megatron_blackmamba.ops.selective_scan import available_backends, selective_scan
from megatron_blackmamba.runtime.memory import keep_freed_memory

OURS = {"cpp": "C++", "chunked": "chunked PyTorch", "triton": "Triton", "mamba_ssm": "mamba_ssm"}
SHORT = 256  # tokens of transformers' forward + backward
Inputs = dict[str, Tensor]


def main() -> None:
    parser = _common.arguments(__doc__)
    for name, default in (("batch", 1), ("inner", 2304), ("length", 2048), ("state", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--without-slow-peers", action="store_true", help="leave out transformers and mambapy")
    parser.add_argument("--keep-memory", action="store_true", help="hold freed memory, as training runs on CPUs do")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.keep_memory:
        keep_freed_memory()

    inputs = scan_inputs(options)
    ways = backends(options.device)
    if not options.without_slow_peers:
        ways |= peers(options.dtype)
    weight_y = torch.randn_like(inputs["u"])
    forward = {name: partial(run_forward, way, inputs) for name, way in ways.items()}
    both = {name: partial(run_both, way, inputs, weight_y) for name, way in ways.items()}
    if "transformers" in ways and options.length > SHORT:
        both["transformers"] = partial(run_both, ways["transformers"], first_tokens(inputs), weight_y[:, :SHORT])
    tables = {}
    for title, calls in (("forward", forward), ("forward + backward", both)):
        seconds = _common.interleaved(calls, repeats=options.repeats, device=options.device)
        if title == "forward + backward" and "transformers" in seconds and options.length > SHORT:
            scale = options.length / SHORT
            seconds["transformers, at least"] = [scale * run for run in seconds.pop("transformers")]
        tables[title] = rows(seconds, limit_ms(options, title))
    shape = f"B={options.batch} I={options.inner} L={options.length} N={options.state} {options.dtype}"
    result = {
        "machine": _common.machine("transformers", "mambapy", "mamba-ssm", "triton"),
        "shape": shape,
        "tables": {f"{title}, {shape}": table for title, table in tables.items()},
    }
    _common.show(result, options.json)


def scan_inputs(options: Any) -> Inputs:
    B, L, I, N = options.batch, options.length, options.inner, options.state
    g = torch.Generator().manual_seed(0)
    shapes = {"u": (B, L, I), "delta": (B, L, I), "z": (B, L, I), "B": (B, L, N), "C": (B, L, N)}
    inputs = {name: torch.randn(shape, generator=g).to(getattr(torch, options.dtype)) for name, shape in shapes.items()}
    inputs["A"] = -torch.arange(1.0, N + 1).repeat(I, 1)
    inputs["D"] = torch.ones(I)
    inputs["delta_bias"] = torch.full((I,), -4.0)
    return {name: tensor.to(options.device).requires_grad_() for name, tensor in inputs.items()}


def first_tokens(inputs: Inputs) -> Inputs:
    per_token = ("u", "delta", "z", "B", "C")
    return {
        name: (tensor[:, :SHORT] if name in per_token else tensor).detach().clone().requires_grad_()
        for name, tensor in inputs.items()
    }


def backends(device: str) -> dict[str, Callable[[Inputs], Tensor]]:
    """The first is what the others are compared with."""
    ways: dict[str, Callable[[Inputs], Tensor]] = {}
    for backend, reason in available_backends().items():
        if backend not in OURS or reason or (device == "cpu") != (backend in ("cpp", "chunked")):
            continue
        if backend != "cpp":
            ways[OURS[backend]] = partial(ours, backend=backend)
            continue
        for isa in reversed(library.runnable_isas()):
            ways[f"C++ {isa}"] = partial(with_isa, isa)
    return ways


def ours(x: Inputs, backend: str) -> Tensor:
    return selective_scan(
        x["u"], x["delta"], x["A"], x["B"], x["C"], x["D"], z_BLI=x["z"], delta_bias_I=x["delta_bias"], backend=backend
    )


def with_isa(isa: str, x: Inputs) -> Tensor:
    with mock.patch.dict("os.environ", BLACKMAMBA_ISA=isa):
        return ours(x, "cpp")


def peers(dtype: str) -> dict[str, Callable[[Inputs], Tensor]]:
    found: dict[str, Callable[[Inputs], Tensor]] = {}
    if find_spec("mambapy"):
        found["mambapy"] = mambapy_scan
    if find_spec("transformers") and dtype == "float32":
        from transformers.models.mamba import modeling_mamba

        if hasattr(modeling_mamba, "mamba_selective_scan"):
            found["transformers"] = partial(transformers_scan, modeling_mamba.mamba_selective_scan)
    return found


def mambapy_scan(x: Inputs) -> Tensor:
    from mambapy.mamba import MambaBlock

    delta = F.softplus(x["delta"] + x["delta_bias"])
    return MambaBlock.selective_scan(None, x["u"], delta, x["A"], x["B"], x["C"], x["D"]) * F.silu(x["z"])


def transformers_scan(scan: Callable[..., Tensor], x: Inputs) -> Tensor:
    u, delta, B, C, z = (x[name].transpose(1, 2) for name in ("u", "delta", "B", "C", "z"))
    return scan(u, delta, x["A"], B, C, D=x["D"], z=z, delta_bias=x["delta_bias"], delta_softplus=True).transpose(1, 2)


def run_forward(way: Callable[[Inputs], Tensor], inputs: Inputs) -> None:
    with torch.no_grad():
        way(inputs)


def run_both(way: Callable[[Inputs], Tensor], inputs: Inputs, weight_y: Tensor) -> None:
    torch.autograd.grad(way(inputs), list(inputs.values()), weight_y)


def limit_ms(options: Any, title: str) -> float | None:
    if options.device != "cpu" or library.unavailable():
        return None
    N = options.state
    exponentials = options.batch * options.length * options.inner * (N + 2 if title == "forward" else 2 * N + 6)
    return 1e3 * exponentials / exponentials_per_second() / options.threads


def exponentials_per_second() -> float:
    probe = library.Probe(exponentials=1 << 24)
    seconds = [_common.timed(lambda: library.call("probe", probe)) for _ in range(9)]
    return probe.exponentials / _common.median(seconds)


def rows(seconds: dict[str, list[float]], limit: float | None) -> list[dict[str, Any]]:
    best = _common.median(next(iter(seconds.values())))
    table: list[dict[str, Any]] = [
        {
            "": name,
            "ms": 1e3 * _common.median(runs),
            "times the first": _common.median(runs) / best,
            "of the limit": None if limit is None else f"{limit / 1e3 / _common.median(runs):.0%}",
            "runs": len(runs),
        }
        for name, runs in seconds.items()
    ]
    if limit is not None:
        table.append({"": "limit", "ms": limit})
    return table


if __name__ == "__main__":
    main()
