"""Kernels of another version beside those of this one, in turns in one process.

    mkdir old && git archive REVISION megatron_blackmamba/ops | tar -x -C old
    python -m benchmarks.gpu_versions old [--sequences 19] [--only norm loss ...] [--candidates]

A kernel's own file comes from the folder; what that imports is this version's. Each row gives the median time of a call
and the time for the bytes that it must move, at the measured copy bandwidth. --candidates also times other launches.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks._common import table
from benchmarks.gpu_kernels import EXPERTS, INNER, LENGTH, TAPS, Machine, _timed, normal
from megatron_blackmamba.ops import order
from megatron_blackmamba.ops.causal_conv1d import Inputs
from megatron_blackmamba.ops.causal_conv1d import triton as triton_convolution
from megatron_blackmamba.ops.causal_conv1d.halves import RowGradient
from megatron_blackmamba.ops.cross_entropy import triton as triton_cross_entropy
from megatron_blackmamba.ops.rms_norm import triton as triton_norm
from megatron_blackmamba.ops.sinkhorn import LOAD_BOUND, MOST_ITERATIONS
from megatron_blackmamba.ops.sinkhorn import Inputs as SinkhornInputs
from megatron_blackmamba.ops.sinkhorn import triton as triton_sinkhorn

MODEL, VOCABULARY = 1152, 50_304
REPEATS, WARM_UP = 15, 2


class Call(NamedTuple):
    name: str
    megabytes: float
    run: Callable[[], Any]


class Version(NamedTuple):
    """One way to run an operation: its calls follow each other, under the settings of a module."""

    name: str
    calls: list[Call]
    module: ModuleType | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012


def loaded(folder: Path, module: ModuleType) -> ModuleType:
    """Return the module as it is in the folder."""
    path = folder / Path(*module.__name__.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"old_{path.stem}", path)
    if not (path.exists() and spec and spec.loader):
        sys.exit(f"gpu_versions: no such file: {path}")
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


@contextmanager
def changed(module: ModuleType | None, settings: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def norm_versions(old: Path, tokens: int) -> Iterator[Version]:
    inputs = normal(tokens, MODEL, dtype=torch.float32), normal(MODEL), normal(tokens, MODEL)
    grads = normal(tokens, MODEL).detach(), normal(tokens, MODEL, dtype=torch.float32).detach()
    megabytes = tokens * MODEL / 1e6

    def calls(module: ModuleType) -> list[Call]:
        made: list[Any] = []

        def forward() -> None:
            made[:] = module.norm_and_stream(inputs[0], inputs[1], 1e-5, inputs[2])

        return [
            Call("norm forward", 12 * megabytes, forward),
            Call("norm backward", 16 * megabytes, lambda: torch.autograd.grad(made, inputs, grads)),
        ]

    yield Version("new", calls(triton_norm))
    yield Version("old", calls(loaded(old, triton_norm)))
    for number in (528, 792, 1024, 1320, 2640):
        yield Version(f"{number} programs", calls(triton_norm), triton_norm, {"programs": lambda x, n=number: n})


def loss_versions(old: Path, tokens: int) -> Iterator[Version]:
    logits, labels = normal(tokens, VOCABULARY).detach(), torch.randint(VOCABULARY, (tokens,), device="cuda")

    def calls(module: ModuleType) -> list[Call]:
        return [Call("loss", 4 * logits.numel() / 1e6, lambda: module.losses_of(logits, labels, True))]

    yield Version("new", calls(triton_cross_entropy))
    yield Version("old", calls(loaded(old, triton_cross_entropy)))
    for block, loads, warps in ((4096, 2, 16), (4096, 3, 16), (8192, 1, 32), (8192, 2, 32), (2048, 4, 8)):
        settings = {"BLOCK_V": block, "LOADS": loads, "WARPS": warps}
        yield Version(f"block {block}, {loads} loads", calls(triton_cross_entropy), triton_cross_entropy, settings)


def order_versions(old: Path, tokens: int) -> Iterator[Version]:
    choice = torch.randint(EXPERTS, (tokens,), device="cuda")

    def calls(backend: str) -> list[Call]:
        return [Call("order", 32 * tokens / 1e6, lambda: order.order_of(choice, EXPERTS, backend=backend))]

    yield Version("counting sort", calls("triton"))
    yield Version("PyTorch", calls("reference"))


def sinkhorn_versions(old: Path, tokens: int) -> Iterator[Version]:
    logits = normal(tokens, EXPERTS, dtype=torch.float32).detach()
    counts = torch.zeros(EXPERTS, device="cuda", dtype=torch.int64)

    def calls(module: ModuleType, scale: float = 1.0, **bounded: Any) -> list[Call]:
        inputs = SinkhornInputs(logits * scale, **bounded)
        return [Call("sinkhorn", 12 * logits.numel() / 1e6, lambda: module.choice(inputs, counts))]

    yield Version("new", calls(triton_sinkhorn))
    yield Version("old", calls(loaded(old, triton_sinkhorn)))
    for std in (1, 4, 16):
        auto = {"iterations": MOST_ITERATIONS, "bound": LOAD_BOUND}
        yield Version(f"auto, std {std}", calls(triton_sinkhorn, std, **auto))


def convolution_versions(old: Path, tokens: int) -> Iterator[Version]:
    batch = tokens // LENGTH
    rows, weight, bias = normal(batch, LENGTH, 2 * INNER), normal(INNER, TAPS), normal(INNER)
    grads = [normal(batch, LENGTH, INNER).detach() for _ in range(3)]
    megabytes = tokens * INNER / 1e6

    def calls(module: ModuleType) -> list[Call]:
        made: list[Any] = []

        def forward() -> None:
            inputs = Inputs(rows.chunk(2, dim=-1)[0], weight, bias)
            made[:] = module.convolve_rows(rows, inputs, RowGradient())

        return [
            Call("convolution forward", 4 * megabytes, forward),
            Call(
                "convolution backward", 12 * megabytes, lambda: torch.autograd.grad(made, (rows, weight, bias), grads)
            ),
        ]

    yield Version("new", calls(triton_convolution))
    yield Version("old", calls(loaded(old, triton_convolution)))


CASES = {
    "norm": norm_versions,
    "loss": loss_versions,
    "order": order_versions,
    "sinkhorn": sinkhorn_versions,
    "convolution": convolution_versions,
}


def rows_of(versions: list[Version], machine: Machine) -> list[dict[str, Any]]:
    taken: dict[tuple[str, str], list[float]] = {}
    for repeat in range(-WARM_UP, REPEATS):
        for version in versions:
            with changed(version.module, version.settings):
                for call in version.calls:
                    took = _timed(call.run)
                    if repeat >= 0:
                        taken.setdefault((call.name, version.name), []).append(took)
    megabytes = {call.name: call.megabytes for call in versions[0].calls}
    return [
        {
            "operation": operation,
            "version": version,
            "ms": statistics.median(times),
            "least ms": min(times),
            "ms for its bytes": megabytes[operation] * 1e6 / machine.bytes_a_ms,
        }
        for (operation, version), times in sorted(taken.items(), key=lambda item: item[0][0])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="folder with another version's megatron_blackmamba/ops")
    parser.add_argument("--sequences", type=int, default=19)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--candidates", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_versions: this machine has no CUDA device; benchmarks.triton_resources needs none")
    machine = Machine()
    print(machine.describe())
    for name in options.only:
        versions = list(CASES[name](options.old, options.sequences * LENGTH))
        print(table(rows_of(versions if options.candidates else versions[:2], machine)), flush=True)
        del versions
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
