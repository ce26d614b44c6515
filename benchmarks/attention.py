"""Attention across documents and within them, forward + backward, by length.

    python -m benchmarks.attention [--lengths 2048 8192 32768 --heads 4 --kv-heads 2 --channels 64 --mean 1000] [--json]

Documents have log-normal lengths, as web pages do. Across documents, PyTorch's causal kernel does it in one call.
Within them, `ops/attention.py` calls it block by block with a mask, and once more in the backward pass.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import _common
from megatron_blackmamba.ops.attention import Documents, attention, documents_of

ACROSS, WITHIN = "across documents", "within documents"


def main() -> None:
    parser = _common.arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=(2048, 8192, 32768))
    for name, default in (("heads", 4), ("kv-heads", 2), ("channels", 64), ("mean", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        random = torch.Generator().manual_seed(length)
        q, k, v = (
            torch.randn(1, heads, length, options.channels, generator=random).to(options.device).requires_grad_()
            for heads in (options.heads, options.kv_heads, options.kv_heads)
        )
        documents = documents_of(resets(length, options.mean, random).to(options.device))
        calls = {ACROSS: partial(both, q, k, v, None), WITHIN: partial(both, q, k, v, documents)}
        seconds = _common.interleaved(calls, repeats=options.repeats, device=options.device)
        across, within = (_common.median(seconds[name]) for name in (ACROSS, WITHIN))
        number = len(documents.starts_BL.unique())
        row = {"tokens": length, "documents": number, f"{ACROSS}, ms": 1e3 * across, f"{WITHIN}, ms": 1e3 * within}
        rows.append(row | {"times": within / across})
    shape = f"H={options.heads} G={options.kv_heads} C={options.channels} float32"
    _common.show({"machine": _common.machine(), "tables": {f"forward + backward, {shape}": rows}}, options.json)


def resets(length: int, mean: int, random: torch.Generator) -> Tensor:
    """Return True at the first token of documents whose lengths are log-normal with this mean, `[1, L]`."""
    sigma = 1.0
    sizes = (torch.randn(length, generator=random) * sigma - sigma**2 / 2).exp() * mean
    ends = sizes.long().clamp_min(1).cumsum(0)
    found = torch.zeros(1, length, dtype=torch.bool)
    found[0, ends[ends < length]] = True
    return found


def both(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> None:
    torch.autograd.grad(attention(q, k, v, documents).square().sum(), (q, k, v))


if __name__ == "__main__":
    main()
