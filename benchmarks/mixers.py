"""One layer of Mamba, Mamba-2, Mamba-3 and the delta rule at the same width, forward + backward.

    python -m benchmarks.mixers [--hidden 1152 --length 512 --batch 1 --state 128 --head 64 --rank 1 --delta gdn]

The defaults are one sequence of the 1.5B model's width. A layer is everything between norm and residual: projections,
convolution where there is one, scan and gate. Mamba has its usual 16 states; --rank is Mamba-3's. The delta rule has
--state key and value channels a head, and two heads share a key, as in Qwen3-Next; --delta names its variant.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import _common
from megatron_blackmamba.config import load
from megatron_blackmamba.layers import kinds_in
from megatron_blackmamba.model import build
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.runtime import world

PATTERN = "SRGM"


def main() -> None:
    parser = _common.arguments(__doc__)
    for name, default in (("hidden", 1152), ("length", 512), ("batch", 1), ("state", 128), ("head", 64), ("rank", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--delta", default="gdn", choices=("gdn", "kda", "gdn2"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [
        f"model.{kind}.{key}"
        for kind in ("mamba2", "mamba3")
        for key in (f"head_dim={options.head}", f"state_size={options.state}")
    ]
    sizes += [f"model.hidden_size={options.hidden}", f"model.mamba3.rank={options.rank}"]
    sizes += [f"model.delta.head_dim={options.state}", f"model.delta.key_dim={options.state}"]
    sizes += [
        f"model.delta.key_heads={max(1, options.hidden // options.state)}",
        f"model.delta.variant={options.delta}",
    ]
    overrides = [f"model.pattern={PATTERN}", "training.precision=fp32", *sizes]
    config = load("tiny", overrides)
    network = build(config, world.start(config.parallel))
    x_SBD = torch.randn(options.length, options.batch, options.hidden, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], None]] = {
        kind.name: partial(both, block.mixer, x_SBD)
        for kind, block in zip(kinds_in(PATTERN), network.decoder.layers, strict=True)
    }
    seconds = _common.interleaved(calls, repeats=options.repeats, device=options.device)
    first = _common.median(next(iter(seconds.values())))
    rows: list[dict[str, Any]] = [
        {"": name, "ms": 1e3 * _common.median(runs), "times Mamba-2": _common.median(runs) / first, "runs": len(runs)}
        for name, runs in seconds.items()
    ]
    shape = f"D={options.hidden} L={options.length} B={options.batch} N={options.state} P={options.head} float32"
    shape += f", rank {options.rank}" if options.rank > 1 else ""
    _common.show({"machine": _common.machine(), "tables": {f"forward + backward, {shape}": rows}}, options.json)
    world.shutdown()


def both(mixer: nn.Module, x_SBD: Tensor) -> None:
    tokens_BS = torch.zeros(x_SBD.shape[1], x_SBD.shape[0], dtype=torch.long)
    mixer(x_SBD.clone().requires_grad_(), LayerInputs(tokens_BS)).square().mean().backward()
    mixer.zero_grad()


if __name__ == "__main__":
    main()
