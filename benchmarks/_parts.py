"""Split the time of a training step by part of the model, forward and backward together.

Modules mark their forward passes. An operation of the backward pass belongs to the part whose forward pass created it,
according to autograd's sequence numbers. The time of an operation is that of its kernels on a GPU, and CPU time
otherwise. A kernel launched outside any operation, as by Triton, belongs to the part in which the host launched it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "part: "
PARTS = {
    "MambaMixer": "Mamba, but scan and convolution",
    "MoEMixer": "dispatch",
    "KindRouter": "router",
    "MegatronRouter": "router",
    "GroupedExperts": "experts",
    "AttentionMixer": "attention",
    "DenseMLP": "MLP",
    "RMSNorm": "norms",
    "LastNorm": "norms",
    "LanguageModelEmbedding": "embedding, head",
    "ColumnLinear": "embedding, head",  # those inside the mixers are under a mark already
}
BY_OPERATION = {
    "adding up gradients": (
        "torch::autograd::AccumulateGrad",
        "autograd::engine::evaluate_function: torch::autograd::Acc",
    ),
    "selective scan": ("_Scan", "SelectiveScanFn", "_Recurrence"),
    "convolution": ("_Convolution", "CausalConv1dFn"),
}
BACKWARD = 1  # of an event's scope
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_dot_product")
REST = "loss, residual stream, others"
LAUNCHES = ("cuda_runtime", "cuda_driver")


class Work(NamedTuple):
    """Time that an operation took, on a GPU that of one kernel."""

    operation: Any
    name: str
    microseconds: float


class Breakdown:
    """Milliseconds a step by part; of a GPU also the time in which no kernel ran, and the kernels that took longest."""

    def __init__(self, events: list[Any], steps: int, step_ms: float, on_gpu: bool):
        made_by = _part_of_sequence(events)
        parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        kernels = _kernels(events) if on_gpu else []
        for work in kernels if on_gpu else _on_cpu(events):
            milliseconds, took = parts[_part(work.operation, made_by)], work.microseconds / 1e3 / steps
            milliseconds[0] += took
            milliseconds[1] += took if work.operation and work.operation.name.startswith(PRODUCTS) else 0.0
        self.parts = dict(parts)
        self.together_ms = max(step_ms, sum(ms for ms, _ in parts.values()))
        self.kernels = _longest_kernels(kernels, steps)

    def rows(self) -> list[dict[str, Any]]:
        """A table, the largest part first; `products` is the share of matrix products within a part."""
        rows = [
            {"part": part, "ms": ms, "share": f"{ms / self.together_ms:.1%}", "products": f"{products / ms:.0%}"}
            for part, (ms, products) in sorted(self.parts.items(), key=lambda item: -item[1][0])
        ]
        idle = self.together_ms - sum(ms for ms, _ in self.parts.values())
        return [*rows, {"part": "no operation running", "ms": idle, "share": f"{idle / self.together_ms:.1%}"}]


def breakdown(
    model: nn.Module, gradients: Callable[[], Any], update: Callable[[], Any], steps: int, step_ms: float
) -> Breakdown:
    """Profile some steps. They must have run before, and `step_ms` is what one takes when nobody looks."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with marked(model), profile(activities=activities, acc_events=True) as recorded:
        for _ in range(steps):
            with record_function(MARK + REST):
                gradients()
            with record_function(MARK + "optimizer"):
                update()
        if on_gpu:
            torch.cuda.synchronize()
    return Breakdown(recorded.events(), steps, step_ms, on_gpu)


def part_of(name: str, module: nn.Module) -> str | None:
    """The part that a module's forward pass is, if it is one."""
    kind = type(module).__name__
    return None if kind == "ColumnLinear" and ".mixer." in name else PARTS.get(kind)


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Within, the forward passes of the model's parts carry their names into a profile."""
    open_marks: list[Any] = []

    def enter(part: str, *_: Any) -> None:
        open_marks.append(record_function(MARK + part))
        open_marks[-1].__enter__()

    def leave(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    hooks = []
    for name, module in model.named_modules():
        if part := part_of(name, module):
            hooks += [module.register_forward_pre_hook(partial(enter, part)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _on_cpu(events: list[Any]) -> list[Work]:
    host = [event for event in events if event.device_type == DeviceType.CPU and event.self_cpu_time_total]
    return [Work(event, event.name, event.self_cpu_time_total) for event in host]


def _launches(event: Any) -> bool:
    """Return whether an event is a call of CUDA; before torch 2.12, only its name tells."""
    kind = getattr(event, "activity_type", None)
    return kind in LAUNCHES if kind is not None else event.name.startswith(("cuda", "cuLaunch"))


def _kernels(events: list[Any]) -> list[Work]:
    """Return the kernels, each with the operation that it is linked to, or in which the host launched it."""
    host = [event for event in events if event.device_type == DeviceType.CPU]
    launches = {event.id: event for event in host if _launches(event)}
    operations = [event for event in host if not _launches(event) and not event.is_async]
    by_id = {event.id: event for event in operations}
    operations.sort(key=lambda event: event.time_range.start)
    starts = [event.time_range.start for event in operations]

    def around(launch: Any) -> Any:
        if launch is None:
            return None
        time = launch.time_range.start
        before = bisect_right(starts, time)
        event = operations[before - 1] if before else None
        while event is not None and event.time_range.end <= time:
            event = event.cpu_parent
        return event

    kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    return [
        Work(
            by_id.get(getattr(kernel, "linked_correlation_id", 0)) or around(launches.get(kernel.id)), kernel.name, took
        )
        for kernel in kernels
        if (took := kernel.time_range.elapsed_us())
    ]


def _part_of_sequence(events: list[Any]) -> dict[int, str]:
    """Autograd's sequence number of a forward operation -> its part."""
    made_by = {}
    for event in events:
        if event.device_type == DeviceType.CPU and event.sequence_nr >= 0 and not _is_backward(event):
            made_by[event.sequence_nr] = _part(event, {})
    return made_by


def _is_backward(event: Any) -> bool:
    return event.scope == BACKWARD or event.name.startswith("autograd::engine::evaluate_function")


def _part(event: Any, made_by: dict[int, str]) -> str:
    """Return the part of an event: from the nearest enclosing mark, backward operation or operation of known name."""
    while event is not None:
        for part, names in BY_OPERATION.items():
            if event.name.startswith(names):
                return part
        if event.name.startswith(MARK):
            return event.name.removeprefix(MARK)
        if _is_backward(event) and event.sequence_nr in made_by:
            return made_by[event.sequence_nr]
        event = event.cpu_parent
    return REST


def _longest_kernels(kernels: list[Work], steps: int, count: int = 20) -> list[dict[str, Any]]:
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for work in kernels:
        totals[work.name][0] += work.microseconds / 1e3 / steps
        totals[work.name][1] += 1 / steps
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:count]
    return [{"kernel": name[:90], "ms": ms, "calls": round(calls)} for name, (ms, calls) in longest]
