"""A band for the MFU of a rehearsed step: what its assumptions are worth, and what measuring one of them would leave.

The upper end assumes that large products reach the share of their peak in plan/gpus.py, that nothing is spent on
communication, and that the host is never late. The lower end takes a cautious value for each.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.rehearsal.record import Op
from megatron_blackmamba.layers import Work
from megatron_blackmamba.plan import roofline
from megatron_blackmamba.plan.gpus import Gpu

SHARES = (0.60, 0.65, 0.70, 0.75, 0.80)
"""Shares of their peak that large products may turn out to reach."""


@dataclass(frozen=True)
class Assumptions:
    """Everything that the MFU of a rehearsed step depends on besides the step."""

    products: float
    """Share of their peak that large products reach."""
    exchange_gb_s: float = float("inf")
    """GB/s of the exchange of tokens between GPUs of a node, which nothing hides. Other collectives are hidden."""
    wait_us: float = 0.0
    """Microseconds that the GPU is idle each time the host waits for it: the queue is empty then."""


def cautious(gpu: Gpu) -> Assumptions:
    """Return what a first run may find: products at 65% of peak, NVLink at 78% of its speed, 50 us a wait."""
    return Assumptions(min(0.65, gpu.product_share), 0.78 * gpu.nvlink_gb_s, 50.0)


def optimistic(gpu: Gpu) -> Assumptions:
    return Assumptions(gpu.product_share)


@dataclass(frozen=True)
class Step:
    """A rehearsed step."""

    ops: list[Op]
    waits: int
    ranks: int
    useful: float
    """FLOPs that count for the MFU."""

    def seconds(self, gpu: Gpu, under: Assumptions) -> float:
        speeds = gpu.model_copy(update={"product_share": under.products})
        sent = sum(op.sent for op in self.ops if "alltoall" in op.name) * (self.ranks - 1) / self.ranks
        return (
            sum(seconds_of(op, speeds) for op in self.ops)
            + sent / (1e9 * under.exchange_gb_s)
            + 1e-6 * under.wait_us * self.waits
        )

    def mfu(self, gpu: Gpu, precision: str, under: Assumptions) -> float:
        return self.useful / self.seconds(gpu, under) / gpu.peak(precision)


def seconds_of(op: Op, gpu: Gpu) -> float:
    return roofline.seconds(Work(op.moved, op.flops, op.slots, op.launches), gpu, op.precision)


def band(step: Step, gpu: Gpu, precision: str, measured: bool = False) -> list[dict[str, Any]]:
    """Return a row for each assumption, with the MFU if it alone is cautious, between the two ends.

    measured: whether the products' share in `gpu` is; then it is the same at both ends.
    """
    best, worst = optimistic(gpu), cautious(gpu)
    if measured:
        worst = replace(worst, products=best.products)

    def row(name: str, assumed: str, instead: str, under: Assumptions) -> dict[str, Any]:
        mfu = f"{step.mfu(gpu, precision, under):.1%}"
        return {"assumption": name, "upper end": assumed, "lower end": instead, "MFU if lower": mfu}

    exchange, waits = replace(best, exchange_gb_s=worst.exchange_gb_s), replace(best, wait_us=worst.wait_us)
    return [
        row("none lower", "", "", best),
        row(
            "products", f"{best.products:.0%} of peak", f"{worst.products:.0%}", replace(best, products=worst.products)
        ),
        row("exchange of tokens", "free", f"{worst.exchange_gb_s:.0f} GB/s, not hidden", exchange),
        row("waits of the host", f"{step.waits}, free", f"{worst.wait_us:.0f} us each", waits),
        row("all of them", "", "", worst),
    ]


def if_measured(step: Step, gpu: Gpu, precision: str, shares: Iterable[float] = SHARES) -> list[dict[str, Any]]:
    """Return the band that is left if the products' share of their peak is measured."""
    rows = []
    for share in shares:
        ends = (replace(end, products=share) for end in (cautious(gpu), optimistic(gpu)))
        low, high = (step.mfu(gpu, precision, end) for end in ends)
        rows.append({"products at": f"{share:.0%} of peak", "MFU from": f"{low:.1%}", "to": f"{high:.1%}"})
    return rows
