"""Our kernels on this GPU beside their peers and the machine's limits.

    python -m benchmarks.gpu_kernels [--batch 8 18 1] [--json FILE]

Peers run in the same process and take turns. A row gives the median time of a call, our time as a fraction of it, and
the memory that a call adds to its inputs. The limit of a scan is the time for its bytes, at the measured copy
bandwidth, or for its exponentials, whichever is longer.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH, INNER, STATE, TAPS, EXPERTS = 2048, 2304, 16, 4, 8  # the 1.5B model
HEAD, SSD_STATE = 64, 128  # of Mamba-2
REPEATS = 15
HEAD_START = 5_000_000  # clocks, some 3 ms
EXPONENTIALS_A_CLOCK = 16  # of one multiprocessor


@dataclass
class Row:
    operation: str
    batch: int
    peer: str
    forward_ms: float
    backward_ms: float | None
    forward_ratio: float
    backward_ratio: float | None
    added_mb: float
    forward_limit_ms: float | None = None


@dataclass
class Peer:
    """A call that returns what to differentiate, and the tensors it is differentiated by."""

    name: str
    call: Callable[[], Tensor]
    inputs: list[Tensor]


class Machine:
    def __init__(self) -> None:
        self.properties = torch.cuda.get_device_properties(0)
        source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        milliseconds = statistics.median(_timed(lambda: target.copy_(source)) for _ in range(REPEATS))
        self.bytes_a_ms = 2 * source.numel() / milliseconds
        clock_khz = getattr(self.properties, "clock_rate", 1_755_000)
        self.exponentials_a_ms = EXPONENTIALS_A_CLOCK * self.properties.multi_processor_count * clock_khz

    def describe(self) -> dict:
        return {
            "device": self.properties.name,
            "bandwidth_tb_s": self.bytes_a_ms / 1e9,
            **{name: _version(name) for name in ("torch", "triton", "mamba-ssm", "causal-conv1d")},
        }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _timed(call: Callable[[], object]) -> float:
    """Return the milliseconds of the kernels of a call: while the GPU waits first, the host launches them all."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def compare(operation: str, batch: int, peers: list[Peer], limit_ms: float | None = None) -> list[Row]:
    """Time every peer in turn, REPEATS times; the first peer is ours."""
    peers = [peers[0], *(peer for peer in peers[1:] if _works(peer))]
    taken: dict[str, list[tuple[float, float | None, float]]] = {peer.name: [] for peer in peers}
    for repeat in range(-2, REPEATS):
        for peer in peers:
            once = _forward_and_backward(peer)
            if repeat >= 0:  # the first ones compile
                taken[peer.name].append(once)
    medians = {name: [_median(column) for column in zip(*times, strict=True)] for name, times in taken.items()}
    our_ahead, our_back, _ = medians[peers[0].name]
    return [
        Row(operation, batch, name, ahead, back, our_ahead / ahead, our_back / back if back else None, added, limit_ms)
        for name, (ahead, back, added) in medians.items()
    ]


def _works(peer: Peer) -> bool:
    """Return whether the peer runs here; print its error otherwise."""
    try:
        _forward_and_backward(peer)
    except Exception as error:
        print(f"{peer.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True


def _forward_and_backward(peer: Peer) -> tuple[float, float | None, float]:
    """Milliseconds of each, and the MiB they added to what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output: list[Tensor] = []
    ahead = _timed(lambda: output.append(peer.call()))
    back = None
    if output[0].requires_grad:
        dy = torch.ones_like(output[0])
        back = _timed(lambda: torch.autograd.grad(output[0], peer.inputs, dy))
    return ahead, back, (torch.cuda.max_memory_allocated() - before) / 2**20


def _median(values: tuple[float | None, ...]) -> float | None:
    return None if None in values else statistics.median(values)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def scan_rows(machine: Machine, batch: int) -> list[Row]:
    from megatron_blackmamba.ops.selective_scan import Inputs, available_backends, chunked, cuda, triton

    u, delta, z = (normal(batch, LENGTH, INNER) for _ in range(3))
    B, C = (normal(batch, LENGTH, STATE) for _ in range(2))
    A = (-torch.rand(INNER, STATE, device="cuda") * STATE).requires_grad_()
    D, bias = normal(INNER, dtype=torch.float32), (normal(INNER, dtype=torch.float32) - 4).detach().requires_grad_()
    inputs = [u, delta, A, B, C, D, z, bias]
    given = Inputs(*inputs)

    def ours() -> Tensor:
        return triton.scan(given)[0]

    peers = [Peer("triton", ours, inputs)]
    if available_backends()["cuda"] is None and cuda.unsupported(given) is None:
        peers.insert(0, Peer("cuda", lambda: cuda.scan(given)[0], inputs))
    if available_backends()["mamba_ssm"] is None:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        from megatron_blackmamba.ops.selective_scan import mamba_ssm

        peers.append(Peer("mamba-ssm, token-major", lambda: mamba_ssm.scan(given)[0], inputs))
        u_, delta_, z_, B_, C_ = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (u, delta, z, B, C))
        peers.append(
            Peer(
                "mamba-ssm, channel-major",
                lambda: selective_scan_fn(u_, delta_, A, B_, C_, D, z_, bias, delta_softplus=True),
                [u_, delta_, A, B_, C_, D, z_, bias],
            )
        )
    if batch == 1:
        peers.append(Peer("PyTorch, chunked", lambda: chunked.scan(given)[0], inputs))
    elements = batch * LENGTH * INNER
    bytes_moved = 4 * 2 * elements + 2 * 2 * batch * LENGTH * STATE
    exponentials = elements * (STATE + 4)  # softplus and the gate take two each
    limit = max(bytes_moved / machine.bytes_a_ms, exponentials / machine.exponentials_a_ms)
    return compare("selective_scan", batch, peers, limit)


def ssd_rows(machine: Machine, batch: int) -> list[Row]:
    from megatron_blackmamba.ops.ssd import Inputs, available_backends, chunked, triton

    heads = INNER // HEAD
    x, dt = normal(batch, LENGTH, heads, HEAD), normal(batch, LENGTH, heads)
    B, C = (normal(batch, LENGTH, 1, SSD_STATE) for _ in range(2))
    A = (-1 - 15 * torch.rand(heads, device="cuda")).requires_grad_()
    D, bias = normal(heads, dtype=torch.float32), (normal(heads, dtype=torch.float32) - 4).detach().requires_grad_()
    inputs = [x, dt, A, B, C, D, bias]
    given = Inputs(*inputs)
    peers = [Peer("triton", lambda: triton.scan(given)[0], inputs)]
    if available_backends()["mamba_ssm"] is None:
        from megatron_blackmamba.ops.ssd import mamba_ssm

        peers.append(Peer("mamba-ssm", lambda: mamba_ssm.scan(given)[0], inputs))
    peers.append(Peer("PyTorch, chunked", lambda: chunked.scan(given)[0], inputs))
    bytes_moved = 2 * batch * LENGTH * (2 * INNER + heads + 2 * SSD_STATE)
    return compare("ssd", batch, peers, bytes_moved / machine.bytes_a_ms)


def gated_norm_rows(machine: Machine, batch: int) -> list[Row]:
    from megatron_blackmamba.ops.gated_norm import gated_rms_norm

    x, rows, weight = normal(batch, LENGTH, INNER), normal(batch, LENGTH, 2 * INNER + 2 * SSD_STATE), normal(INNER)

    def by(backend: str) -> Tensor:
        return gated_rms_norm(x, rows[..., :INNER], weight, 1, 1e-5, backend=backend)

    names = {"triton": "triton", "PyTorch": "reference"}
    peers = [Peer(name, partial(by, backend), [x, rows, weight]) for name, backend in names.items()]
    return compare("gated norm", batch, peers, 3 * 2 * x.numel() / machine.bytes_a_ms)


def convolution_rows(machine: Machine, batch: int) -> list[Row]:
    from megatron_blackmamba.ops.causal_conv1d import Inputs, triton

    x, weight, bias = normal(batch, LENGTH, INNER), normal(INNER, TAPS), normal(INNER)
    inputs = [x, weight, bias]
    x_ = x.detach().transpose(1, 2).contiguous().requires_grad_()

    def by_torch() -> Tensor:
        return F.silu(F.conv1d(x_, weight[:, None], bias, padding=TAPS - 1, groups=INNER)[..., :LENGTH])

    peers = [
        Peer("triton", lambda: triton.convolve(Inputs(x, weight, bias)), inputs),
        Peer("PyTorch, channel-major", by_torch, [x_, weight, bias]),
    ]
    try:
        from causal_conv1d import causal_conv1d_fn

        peers.append(
            Peer(
                "causal-conv1d, channel-major",
                lambda: causal_conv1d_fn(x_, weight, bias, activation="silu"),
                [x_, weight, bias],
            )
        )
    except ImportError:
        pass
    return compare("causal_conv1d", batch, peers, 2 * 2 * x.numel() / machine.bytes_a_ms)


def sinkhorn_rows(machine: Machine, batch: int) -> list[Row]:
    from megatron_blackmamba.ops.sinkhorn import Inputs, reference, triton

    logits = normal(batch * LENGTH, EXPERTS, dtype=torch.float32).detach()
    inputs = Inputs(logits)
    peers = [
        Peer("triton", lambda: triton.choice(inputs), []),
        Peer("PyTorch", lambda: reference.choice(inputs), []),
    ]
    try:
        from megatron.core.transformer.moe.moe_utils import sinkhorn

        peers.append(Peer("megatron-core", lambda: sinkhorn(logits).argmax(1), []))
    except ImportError:
        pass
    return compare("sinkhorn", batch, peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 18, 1])
    parser.add_argument("--json", metavar="FILE", help="write the rows there too; - for standard output alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels: this machine has no CUDA device; benchmarks.triton_resources needs none")
    machine = Machine()
    rows: list[Row] = []
    if options.json != "-":
        print(json.dumps(machine.describe()))
    for batch in options.batch:
        for rows_of in (scan_rows, ssd_rows, gated_norm_rows, convolution_rows, sinkhorn_rows):
            new = rows_of(machine, batch)
            rows += new
            result = json.dumps({"machine": machine.describe(), "rows": [asdict(row) for row in rows]}, indent=1)
            if options.json and options.json != "-":
                Path(options.json).write_text(result)
            if options.json != "-":
                print(table(new), flush=True)
    if options.json == "-":
        print(result)


def table(rows: list[Row]) -> str:
    head = (
        f"{'operation':<16}{'batch':>6}  {'peer':<30}{'forward ms':>11}{'ours/it':>9}{'backward ms':>12}{'ours/it':>9}"
    )
    lines = [head + f"{'added MiB':>11}{'limit ms':>10}"]
    for row in rows:
        back = (
            "" if row.backward_ms is None else f"{row.backward_ms:.3f}",
            "" if row.backward_ratio is None else f"{row.backward_ratio:.2f}",
        )
        limit = "" if row.forward_limit_ms is None else f"{row.forward_limit_ms:.3f}"
        lines.append(
            f"{row.operation:<16}{row.batch:>6}  {row.peer:<30}{row.forward_ms:>11.3f}{row.forward_ratio:>9.2f}"
            f"{back[0]:>12}{back[1]:>9}{row.added_mb:>11.0f}{limit:>10}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
