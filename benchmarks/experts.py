"""The experts of one layer, forward and forward + backward: one grouped product beside a loop, and the limit.

    python -m benchmarks.experts [--tokens 2048 --hidden 1152 --ffn 3072 --experts 8 --dtype bfloat16] [--json]
    python -m benchmarks.experts --many 128 --top-k 8 --latent 288 --ffn 2048 [--json]

The defaults are one sequence of the 1.5B model with evenly spread tokens (the busiest expert has --imbalance times the
mean). One peer is a loop of products over the experts, as megatron-core does on CPUs. The other is one dense product of
equal size, the limit: no arrangement of the same arithmetic is faster.

With --many, whole layers in fp32 instead, router and sorting included: many small experts beside --experts
whose products for a token are as large.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _common
from benchmarks.mixers import both
from megatron_blackmamba.config import load
from megatron_blackmamba.model import build
from megatron_blackmamba.ops.experts import available_backends, grouped_experts
from megatron_blackmamba.ops.matvec import bf16_products
from megatron_blackmamba.runtime import world

NAMES = {"grouped_mm": "ours, grouped product", "loop": "ours, loop over experts"}


def main() -> None:
    parser = _common.arguments(__doc__)
    for name, default in (("tokens", 2048), ("hidden", 1152), ("ffn", 3072), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--many", type=int, help="experts of a layer of many")
    parser.add_argument("--top-k", type=int, default=8, help="of these for each token")
    parser.add_argument("--latent", type=int, help="model.latent_size; default: none")
    parser.add_argument("--imbalance", type=float, default=1.0)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], help="default: those that products use")
    options = parser.parse_args()
    options.dtype = options.dtype or dtypes(options.device)
    torch.set_num_threads(options.threads)
    tables = {}
    if options.many:
        _common.show({"machine": _common.machine(), "tables": layers(options)}, options.json)
        return
    for dtype in options.dtype:
        x, counts, fc1, fc2 = expert_inputs(options, getattr(torch, dtype))
        ways: dict[str, Callable[[], Tensor]] = {
            NAMES[backend]: partial(grouped_experts, x, counts, fc1, fc2, backend=backend)
            for backend, reason in available_backends().items()
            if reason is None and backend in NAMES
        }
        ways["limit: one dense product"] = partial(dense, x, fc1[0], fc2[0])
        weight = torch.randn_like(x)
        leaves = [x, fc1, fc2]
        for title, calls in (
            ("forward", {name: partial(without_gradient, way) for name, way in ways.items()}),
            ("forward + backward", {name: partial(with_gradient, way, leaves, weight) for name, way in ways.items()}),
        ):
            seconds = _common.interleaved(calls, repeats=options.repeats, device=options.device)
            tables[f"{title}, {dtype}"] = rows(seconds, options, title)
    shape = f"{options.tokens} tokens, D={options.hidden}, F={options.ffn}, E={options.experts}"
    result = {"machine": _common.machine(), "tables": {f"{title}, {shape}": table for title, table in tables.items()}}
    _common.show(result, options.json)


def layers(options: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the time of whole layers with the same FLOPs for a token, routers aside."""
    sizes = {
        options.experts: (1, options.ffn * options.top_k),
        options.many: (options.top_k, options.ffn),
    }
    x_SBD = torch.randn(options.tokens, 1, options.hidden, generator=torch.Generator().manual_seed(0))
    calls, names = {}, {}
    for experts, (top_k, ffn) in sizes.items():
        keys = {"hidden_size": options.hidden, "experts": experts, "top_k": top_k, "expert_hidden_size": ffn}
        keys |= {"pattern": "E", "router.kind": "expert_bias"} | (
            {"latent_size": options.latent} if options.latent else {}
        )
        words = [f"model.{key}={value}" for key, value in keys.items()]
        config = load("tiny", [*words, "training.precision=fp32"])
        with world.fake(config.parallel, world_size=1, where="cpu") as alone:
            (block,) = build(config, alone).decoder.layers
        names[experts] = f"{experts} experts of {ffn}, {top_k} a token"
        calls[names[experts]] = partial(both, block.mixer, x_SBD)
    seconds = _common.interleaved(calls, repeats=options.repeats, device=options.device)
    first = _common.median(seconds[names[options.experts]])
    shape = f"{options.tokens} tokens, D={options.hidden}, latent {options.latent}, float32"
    return {
        f"layer, forward + backward, {shape}": [
            {"": name, "ms": 1e3 * _common.median(runs), "times the first": _common.median(runs) / first}
            for name, runs in seconds.items()
        ]
    }


def dtypes(device: str) -> list[str]:
    """Return the dtypes to measure: bf16 only where products have instructions for it, else it takes minutes."""
    return ["float32", "bfloat16"] if device != "cpu" or bf16_products() else ["float32"]


def expert_inputs(options: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, D, F_, E = options.tokens, options.hidden, options.ffn, options.experts
    g = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=g)
    fc1 = torch.randn(E, 2 * F_, D, generator=g) / D**0.5
    fc2 = torch.randn(E, D, F_, generator=g) / F_**0.5
    counts = torch.full((E,), int(T * (E - options.imbalance) / E / max(E - 1, 1)))
    counts[0] = T - counts[1:].sum()
    leaves = (tensor.to(options.device, dtype).requires_grad_() for tensor in (x, fc1, fc2))
    x, fc1, fc2 = leaves
    return x, counts.to(options.device), fc1, fc2


def dense(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    gate, up = F.linear(x, fc1).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, fc2)


def without_gradient(way: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        way()


def with_gradient(way: Callable[[], Tensor], leaves: list[Tensor], weight: Tensor) -> None:
    torch.autograd.grad(way(), leaves, weight)


def rows(seconds: dict[str, list[float]], options: Any, title: str) -> list[dict[str, Any]]:
    operations = 6 * options.tokens * options.hidden * options.ffn * (1 if title == "forward" else 3)
    limit = _common.median(seconds["limit: one dense product"])
    return [
        {
            "": name,
            "ms": 1e3 * _common.median(runs),
            "times the limit": _common.median(runs) / limit,
            "GFLOP/s": operations / _common.median(runs) / 1e9,
            "runs": len(runs),
        }
        for name, runs in seconds.items()
    ]


if __name__ == "__main__":
    main()
