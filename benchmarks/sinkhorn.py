"""Sinkhorn routing of one micro-batch of tokens beside megatron-core's, and what balance the time buys.

    python -m benchmarks.sinkhorn [--tokens 16384 --experts 8 --std 1 2 16] [--json]

The logits resemble a trained router's: an offset per expert, as strong as the noise. megatron-core iterates until its
factors converge, and waits for the device each time. Ours runs a fixed number of iterations. Both return the expert of
every token. If megatron-core has not converged after --timeout seconds, the table says so.
"""

import signal
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks import _common
from megatron_blackmamba.ops.sinkhorn import load_imbalance, sinkhorn_choice


def main() -> None:
    parser = _common.arguments(__doc__, repeats=15)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--std", type=float, nargs="+", default=[0.68, 1.0, 2.0, 4.0, 16.0])
    parser.add_argument("--timeout", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {
        "machine": _common.machine("megatron-core"),
        "tables": {
            f"logit std {std:g}, S={options.tokens} E={options.experts}": rows(std, options) for std in options.std
        },
        "notes": ["load: tokens of the busiest expert over the mean; 1 is perfect, the number of experts is collapse"],
    }
    _common.show(result, options.json)


def rows(std: float, options: Any) -> list[dict[str, Any]]:
    logits = router_logits(options.tokens, options.experts, std).to(options.device)
    calls: dict[str, Callable[[], Tensor]] = {
        "ours, 1 iteration": partial(sinkhorn_choice, logits),
        "ours, 4 iterations": partial(sinkhorn_choice, logits, iterations=4),
        "ours, 16 iterations": partial(sinkhorn_choice, logits, iterations=16),
        "ours in PyTorch, 1 iteration": partial(sinkhorn_choice, logits, backend="reference"),
        "argmax, no balance": partial(torch.argmax, logits, 1),
    }
    refused: list[dict[str, Any]] = []
    if find_spec("megatron"):
        megatron_sinkhorn()  # importing it takes a while, which is not to count
        if comes_back(partial(megatron_choice, logits), options.timeout):
            calls["megatron-core"] = partial(megatron_choice, logits)
        else:
            refused = [{"": "megatron-core", "load": f"still running after {options.timeout:g} s"}]
    seconds = _common.interleaved(calls, repeats=options.repeats, device=options.device)
    first = _common.median(seconds["ours, 1 iteration"])
    table = [
        {
            "": name,
            "ms": 1e3 * _common.median(runs),
            "times the first": _common.median(runs) / first,
            "load": verdict(name, calls[name], logits, options.experts),
        }
        for name, runs in seconds.items()
    ]
    return table + refused


def router_logits(tokens: int, experts: int, std: float) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return std * (torch.randn(experts, generator=g) + torch.randn(tokens, experts, generator=g))


def megatron_choice(logits: Tensor) -> Tensor:
    return megatron_plan(logits).argmax(1)


def megatron_plan(logits: Tensor) -> Tensor:
    return megatron_sinkhorn()(logits)


def megatron_sinkhorn() -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():  # about Apex and Transformer Engine, which play no role here
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe.moe_utils import sinkhorn

    return sinkhorn


def verdict(name: str, call: Callable[[], Tensor], logits: Tensor, experts: int) -> float | str:
    if name == "megatron-core" and megatron_plan(logits).isnan().any():
        return "NaN: every token to expert 0"
    return load_imbalance(call(), experts).item()


def comes_back(call: Callable[[], object], seconds: float) -> bool:
    """Return whether `call` returns in time. An alarm stops it otherwise, which works for a loop in Python."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        call()
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return True


if __name__ == "__main__":
    main()
