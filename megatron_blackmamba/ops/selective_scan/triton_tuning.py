"""Choose how the Triton selective scan is divided into programs: by a rule, or by a cached measurement.

The rule needs no GPU time and is the default, so that two runs on equal machines round alike. BLACKMAMBA_TRITON_TUNE=1
measures the candidates once a shape and keeps the fastest in BLACKMAMBA_CACHE (default ~/.cache/megatron_blackmamba).

Shapes: B batch, L length, I inner channels, N state.
"""

import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from megatron_blackmamba.ops.selective_scan.inputs import Inputs

WARPS_A_PROCESSOR = 8  # limit of the backward kernel, set by its registers
FEW_WARPS = 2  # of the forward kernel for each scheduler: too few to hide what each of them waits for
WAVES = 4  # programs of one backward launch, in fillings of the GPU: enough to even out their ends
KEPT_WAVES = 8  # the same where states are kept, which is limited by no memory
REPEATS = 5


@dataclass(frozen=True)
class Plan:
    """Channels of a program (one warp a 32 of them), tokens of a step, of a checkpoint, of a segment."""

    block: int = 32
    steps: int = 4
    segment: int = 0  # tokens that run as one sequence; 0: all
    chunk: int = 64  # tokens between the states that the forward pass saves
    backward_block: int = 32
    backward_steps: int = 4
    group: int = 1  # sequences whose states are recomputed at once
    keep: bool = False  # save the states every `backward_steps` tokens, instead of recomputing them
    backward_segment: int = 0  # tokens that the backward pass of kept states runs as one sequence; 0: all
    cuda: bool = False  # the kernels of scan.cu run the two passes
    channels: int = 1  # of a thread of its forward kernel

    def __post_init__(self) -> None:
        segments = self.segment % self.chunk or self.backward_segment % self.chunk
        if self.chunk % self.steps or self.chunk % self.backward_steps or segments:
            raise ValueError(f"steps must divide chunks, and chunks must divide segments: {self}")
        if self.keep and self.steps % self.backward_steps:
            raise ValueError(f"a step must keep whole intervals of states: {self}")

    def backward_length(self, L: int) -> int:
        """Return the tokens of a chunk of the backward pass."""
        return (self.backward_segment or L) if self.keep else self.chunk

    def segments(self, L: int) -> int:
        return triton.cdiv(L, self.segment) if self.segment else 1


Scan = Callable[[Inputs, Plan], tuple[Tensor, Tensor]]
"""The scan under a plan."""


def plan_for(u_BLI: Tensor, N: int, keep: bool, scan: Scan) -> Plan:
    """Return the plan for inputs like u: cached, measured with `scan` now if requested, or by the rule."""
    B, L, I = u_BLI.shape
    if not u_BLI.is_cuda:
        return rule(B, L, I, keep=keep)
    return _plan_on(u_BLI.device, B, L, I, N, u_BLI.dtype, keep, scan)


@cache
def _plan_on(device: torch.device, B: int, L: int, I: int, N: int, dtype: torch.dtype, keep: bool, scan: Scan) -> Plan:
    properties = torch.cuda.get_device_properties(device)
    key = (properties.name, triton.__version__, B, L, I, N, str(dtype), keep)
    if plan := recall(key):
        return plan
    plan = rule(B, L, I, properties.multi_processor_count, properties.major, keep)
    if os.environ.get("BLACKMAMBA_TRITON_TUNE") == "1":
        plan = fastest(candidates(plan, B, L), _training_step(scan, device, B, L, I, N, dtype))
        remember(key, plan)
    return plan


def rule(B: int, L: int, I: int, processors: int = 132, major: int = 9, keep: bool = True) -> Plan:
    """Choose one pass if the channels fill the GPU, else segments, which compute the exponentials twice.

    The backward pass of kept states runs in segments unless sequences fill the GPU many times, since the last of them
    would leave it half empty. Another kernel first computes the gradients of the last states of segments.
    Before Hopper the compiler finds registers for two states of the backward pass, not for four. Keeping every second
    one would take twice the memory, so they are always recomputed.
    """
    keep = keep and major >= 9
    plan = Plan(
        steps=8 if keep else 4,  # measured on an H200: 0.65 of the time with 4; with 16, registers run out
        backward_steps=4 if major >= 9 else 2,
        keep=keep,
    )
    warps, schedulers = B * triton.cdiv(I, plan.block), 4 * processors
    segment = 0
    if warps < FEW_WARPS * schedulers:
        segments = min(triton.cdiv(8 * schedulers, warps), triton.cdiv(L, plan.chunk))
        segment = triton.cdiv(L, segments * plan.chunk) * plan.chunk
    at_once = WARPS_A_PROCESSOR * processors
    plan = replace(plan, segment=0 if segment >= L else segment)
    if keep:
        programs = B * triton.cdiv(I, plan.backward_block)
        parts = triton.cdiv(KEPT_WAVES * at_once, programs)
        length = triton.cdiv(L, parts * plan.chunk) * plan.chunk
        return replace(plan, group=B, backward_segment=0 if length >= L else length)
    programs = triton.cdiv(I, plan.backward_block) * triton.cdiv(L, plan.chunk)
    return replace(plan, group=min(triton.cdiv(WAVES * at_once, programs), B))


def candidates(plan: Plan, B: int, L: int) -> Iterator[Plan]:
    """Yield the rule's plan, then similar plans."""
    yield plan
    for chunk in (64,) if plan.keep else (32, 64, 128):
        for steps in (4, 8) if plan.keep else (2, 4, 8):
            for segments in (1, 2, 4, 8, 16, 32):
                segment = 0 if segments == 1 else triton.cdiv(L, segments * chunk) * chunk
                if segment < L:
                    yield replace(plan, chunk=chunk, steps=steps, segment=segment)
    if plan.keep:
        for segment in (0, 256, 512, 1024):
            if segment < L:
                yield replace(plan, backward_segment=segment)
    else:
        for group in {1, 2, 4, B}:
            yield replace(plan, group=min(group, B))


def fastest(plans: Iterator[Plan], milliseconds: Callable[[Plan], float]) -> Plan:
    return min(plans, key=milliseconds)


def _training_step(
    scan: Scan, device: torch.device, B: int, L: int, I: int, N: int, dtype: torch.dtype
) -> Callable[[Plan], float]:
    def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    u, delta, z = (inputs(B, L, I, dtype=dtype) for _ in range(3))
    B_BLN, C_BLN = (inputs(B, L, N, dtype=dtype) for _ in range(2))
    A, D, bias = inputs(I, N), inputs(I), inputs(I)
    A.data.abs_().neg_()
    given = Inputs(u, delta, A, B_BLN, C_BLN, D, z, bias)

    def milliseconds(plan: Plan) -> float:
        times = []
        for _ in range(REPEATS + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            with torch.enable_grad():
                y, _ = scan(given, plan)
                torch.autograd.grad(y, (u, delta, A, B_BLN, C_BLN, D, z, bias), torch.ones_like(y))
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[1:])  # the first one compiles

    return milliseconds


def cache_folder() -> Path:
    return Path(os.environ.get("BLACKMAMBA_CACHE") or Path.home() / ".cache/megatron_blackmamba") / "triton_plans"


def recall(key: tuple) -> Plan | None:
    """Return the cached plan for this key, if any; an unreadable file counts as missing."""
    try:
        entry = json.loads(_file_of(key).read_text(encoding="utf-8"))
        return Plan(**entry["plan"]) if entry["key"] == list(key) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remember(key: tuple, plan: Plan) -> None:
    """Write one file per shape and rename it into place, so that ranks tuning at the same time do not conflict."""
    file = _file_of(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as draft:
        json.dump({"key": list(key), "plan": asdict(plan)}, draft)
        draft.flush()
        os.fsync(draft.fileno())
    os.replace(draft.name, file)


def _file_of(key: tuple) -> Path:
    return cache_folder() / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24] + ".json")
