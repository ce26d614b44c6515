"""Count the launches of reading a prompt on a GPU, and calculate its time, without a GPU.

    python -m benchmarks.rehearse_prompt [CONFIG] [a.b=c ...] [--rows 1 8] [--prompt 2048] [--gpu h200]

The decoder reads on fake CUDA tensors, as `benchmarks.rehearse` takes a step. `host ms` is the launches, at the time
that the H200's host of November 2026 took for each; a prompt lasts as long as the larger of both.
"""

from benchmarks.rehearsal.requirements import why_not

if reason := why_not():
    raise SystemExit(reason)

from benchmarks.rehearsal import fake_cuda  # isort: skip  (before torch)

if not fake_cuda.torch.cuda.is_available():  # before the package looks for CUDA
    fake_cuda.become_gpu()

import argparse
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks._common import table
from benchmarks.rehearsal.band import seconds_of
from benchmarks.rehearsal.record import LOG, Recorder
from megatron_blackmamba.config import ModelConfig, load
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange.canonical import Canonical, Entry, shapes
from megatron_blackmamba.ops import backends
from megatron_blackmamba.plan import gpus

HOST_MS = 45.6 / 530
"""A prompt of one sequence and its launches, on an H200's host: mostly Python, and GPU work was a seventh of it."""


def read(model: ModelConfig, rows: int, prompt: int) -> None:
    """Record what the decoder launches for a prompt of some sequences."""
    backends.trial = lambda smallest: None  # fake tensors have no values to try a kernel with
    for name in ("read", "stream", "logits_of_stream", "logits"):  # inference mode would hide operations
        method = getattr(Decoder, name)
        setattr(Decoder, name, getattr(method, "__wrapped__", method))
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder(), torch.no_grad():
        entries = {
            name: Entry(shape, torch.bfloat16, lambda shape=shape: torch.empty(shape, dtype=torch.bfloat16))
            for name, shape in shapes(model).items()
        }
        decoder = Decoder(pack(Canonical(model, entries, "no data"), torch.bfloat16, "cuda"))
        state, tokens_BL = decoder.start(rows), torch.zeros(rows, prompt, dtype=torch.long, device="cuda")
        LOG.ops.clear()
        LOG.on = True
        decoder.read(state, tokens_BL)
        LOG.on = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*", metavar="CONFIG|a.b=c")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="numbers of sequences")
    parser.add_argument("--prompt", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--gpu", default="h200", choices=gpus.KNOWN)
    options = parser.parse_intermixed_args()
    overrides = [word for word in options.config if "=" in word]
    model = load([word for word in options.config if "=" not in word] or ["blackmamba_1.5b"], overrides).model
    gpu, found = gpus.KNOWN[options.gpu], []
    for rows in options.rows:
        read(model, rows, options.prompt)
        launches = sum(op.launches for op in LOG.ops)
        gpu_ms = 1e3 * sum(seconds_of(op, gpu) for op in LOG.ops)
        found.append({"rows": rows, "launches": launches, "host ms": HOST_MS * launches, f"{gpu.name} ms": gpu_ms})
    print(table(found))
    counted: Counter[tuple[str, str]] = Counter()
    for op in LOG.ops:
        counted[op.name, op.at] += op.launches
    print("\n" + table([{"operation": op, "at": at, "launches": n} for (op, at), n in counted.most_common()]))


if __name__ == "__main__":
    main()
