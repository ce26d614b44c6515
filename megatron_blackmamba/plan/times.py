"""The time of a step at best: computing by the roofline, launching, idle stages, and the exchanges that nothing hides.

Each layer kind declares its operations (`Cost.work`); this file adds norms, embedding, head, gradients and update.
Calculated, not measured. `tests/rehearsal` compares the computing with the same step rehearsed operation by operation.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.costs import FP32, Work
from megatron_blackmamba.layers import kind_of
from megatron_blackmamba.model.stack import extra_depth_of_stage, layers_of_stage
from megatron_blackmamba.plan import flops, roofline
from megatron_blackmamba.plan.activations import WIDTH, sizes_of
from megatron_blackmamba.plan.gpus import Gpu
from megatron_blackmamba.plan.memory import State, bytes_a_weight, bytes_of_average
from megatron_blackmamba.plan.traffic import DATA_AXES, Flow
from megatron_blackmamba.runtime import layout

LAUNCHING_SECONDS = 3.7e-3
"""The host's time to launch one layer of a micro-batch, forward and backward, whatever its size.

Measured for BlackMamba 1.5B on the hosts of three H200s: 99, 112 and 126 ms for 30 layers. Assumed for other kinds."""
FORWARD_LAUNCHES = 0.38
"""The part of a layer's kernels that its forward pass launches, as rehearsed."""
COLLECTIVE_SECONDS = 2e-5
"""Assumed: the least time of an exchange, whatever its size."""
LOSS_BYTES_OF_PARTS = (38, 14)
"""Moved per logit by megatron-core's cross entropy of a vocabulary divided over ranks, forward and backward."""
ROUNDED = 3 / 4
"""Bytes that rounding to FP8 moves for each byte of a product: 2 read and 1 written of one of two such matrices."""
BLOCK_BYTES = (2 * FP32 + 4, 3 * FP32 + 4)
"""Moved per number of the residual stream by a block's norm and addition, forward and backward, besides the mixer's."""


@dataclass(frozen=True)
class MicroBatch:
    """Seconds of one micro-batch on one pipeline stage."""

    forward: float
    backward: float
    launching: float = 0.0
    """The host's, to launch both."""

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def late(self) -> float:
        """Return by how much the host takes longer than its GPU."""
        return max(0.0, self.launching - self.total)

    def __add__(self, other: "MicroBatch") -> "MicroBatch":
        launching = self.launching + other.launching
        return MicroBatch(self.forward + other.forward, self.backward + other.backward, launching)

    def __mul__(self, number: int) -> "MicroBatch":
        return MicroBatch(number * self.forward, number * self.backward, number * self.launching)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest GPU."""

    computing: float
    """Of all micro-batches on the slowest stage."""
    idle: float
    """At both ends of the pipeline."""
    update: float
    """Gradient norm, clipping, optimizer."""
    waiting: dict[str, float]
    """Exchanges that nothing hides, by axis."""
    launching: float = 0.0
    """By which the host takes longer than its GPU."""

    @property
    def total(self) -> float:
        return self.computing + self.launching + self.idle + self.update + sum(self.waiting.values())

    def mfu(self, config: RunConfig, world_size: int, gpu: Gpu) -> float:
        """Return the share of the peak that useful FLOPs take."""
        return at_peak(config, world_size, gpu) / self.total

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, by a name for people."""
        parts = {"computing": self.computing, "late launches": self.launching}
        parts |= {"idle stages": self.idle, "update": self.update}
        return parts | {f"{axis.replace('_', ' ')} exchange": seconds for axis, seconds in self.waiting.items()}

    def described(self) -> str:
        """Return the parts in one line."""
        return ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in self.parts.items() if seconds >= 5e-4)


def at_peak(config: RunConfig, world_size: int, gpu: Gpu) -> float:
    """Return the seconds of a step's useful FLOPs at the peak. Over MFU, they are the seconds of a step: communication
    and recomputation are not useful."""
    useful = config.tokens_per_step * flops.training(config.model, config.data.sequence_length)
    return useful / (world_size * gpu.peak(config.training.precision))


def of_step(config: RunConfig, world_size: int, gpu: Gpu, flows: dict[str, Flow], state: State | None) -> StepTime:
    """Return the time of a step; without the state, a lower bound that leaves out update and data exchange."""
    stages = config.parallel.pipeline
    slowest = max(of_stages(config, gpu), key=lambda batch: batch.total + batch.late)
    if config.kernels.cuda_graph == "auto" and not layout.why_no_graph(config, world_size):
        slowest = replace(slowest, launching=0.0)
    waiting = {axis: flow.seconds + flow.calls * COLLECTIVE_SECONDS for axis, flow in flows.items()}
    if state is not None:
        waiting |= _exposed(config, {axis: flows[axis].seconds for axis in DATA_AXES if axis in flows}, state, slowest)
    computing = of_micro_batches(config, world_size, slowest, gpu, state)
    update = of_update(config, gpu, state)
    idle = (stages - 1) * (slowest.total + slowest.late)
    launching = layout.micro_batches(config, world_size) * slowest.late
    return StepTime(computing, idle, update, {k: v for k, v in waiting.items() if v > 0}, launching)


def of_micro_batches(config: RunConfig, world_size: int, batch: MicroBatch, gpu: Gpu, state: State | None) -> float:
    """Return the seconds of a step's micro-batches, of adding up their weight gradients too if the state is known.

    The first micro-batch's gradients are copied to the buffer, the others added, so it is read and written.
    """
    batches = layout.micro_batches(config, world_size)
    read = WIDTH[config.training.precision] / _gradient_width(config)
    moved = 0.0 if state is None else (batches * (2 + read) - 1) * state.gradients
    return batches * batch.total + roofline.seconds(Work(moved), gpu)


def of_update(config: RunConfig, gpu: Gpu, state: State | None) -> float:
    """Return the seconds of norm, clipping and optimizer on this rank's part.

    The optimizer state is read and written. A fused update reads the part's gradient for the norm and for the update,
    and writes the weights in bf16. Other optimizers read it four times and write it once.
    """
    if state is None:
        return 0.0
    kind = optimizers.kind_of(config.optimizer.kind)
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    of_weight = bytes_a_weight(dtype, config.optimizer, len(kind.state)) + bytes_of_average(dtype, config)
    weights = state.optimizer / max(1, of_weight)
    width = _gradient_width(config)
    moved = 2 * state.optimizer + (2 * width + dtype.itemsize if kind.fused else 5 * width) * weights
    return roofline.seconds(Work(moved), gpu) + roofline.seconds(Work(flops=state.products), gpu)


def _gradient_width(config: RunConfig) -> int:
    """Return the bytes of one number of a gradient buffer."""
    return WIDTH["bf16"] if config.optimizer.gradients == "bf16" else FP32


def of_stages(config: RunConfig, gpu: Gpu) -> list[MicroBatch]:
    """Return the time of one micro-batch on each stage: its layers, and embedding and head where it has them."""
    model, stages = config.model, config.parallel.pipeline
    layers = {letter: _of_layer(config, letter, gpu) for letter in set(model.trained_pattern)}
    ends = [MicroBatch(0.0, 0.0)] * stages
    ends[0] += _of_embedding(config, gpu)
    ends[-1] += _of_head(config, gpu)
    found = []
    for stage, batch in enumerate(ends):
        letters = Counter(model.pattern[layer] for layer in layers_of_stage(model, stage, stages))
        letters.update(extra_depth_of_stage(model, stage, stages))
        found.append(sum((layers[letter] * number for letter, number in letters.items()), batch))
    return found


def _of_layer(config: RunConfig, letter: str, gpu: Gpu) -> MicroBatch:
    """Return the time of one layer with its norm, its addition, and what its backward pass computes again."""
    sizes, kind = sizes_of(config, "cuda"), kind_of(letter)
    there, back = kind.costs.work(sizes)
    if config.kernels.linear == "fp8":
        there, back = _in_fp8(there, 1, gpu), _in_fp8(back, 1 / 2, gpu)  # not the gradients of weights
    stream = sizes.here * config.model.hidden_size
    norms = [Work(moved * stream) for moved in BLOCK_BYTES]
    batch = replace(_seconds(config, gpu, [*there, norms[0]], [*back, norms[1]]), launching=LAUNCHING_SECONDS)
    again = MicroBatch(0.0, batch.forward, FORWARD_LAUNCHES * batch.launching)
    return batch + again if config.training.recompute in kind.recompute else batch


def _of_embedding(config: RunConfig, gpu: Gpu) -> MicroBatch:
    sizes = sizes_of(config, "cuda")
    moved = (2 * sizes.width + 2 * FP32) * sizes.here * config.model.hidden_size
    return _seconds(config, gpu, [Work(moved)], [Work(moved)])


def _of_head(config: RunConfig, gpu: Gpu) -> MicroBatch:
    """Return the time of the last norm, the product with the vocabulary, and the loss, which overwrites the logits.

    Multi-token prediction has all of it twice, and a product before its second.
    """
    sizes, model = sizes_of(config, "cuda"), config.model
    V, stream = model.vocab_size // config.parallel.tensor, sizes.here * model.hidden_size
    product = Work(flops=2 * sizes.whole * model.hidden_size * V)
    norm, gradients = Work((3 * FP32 + sizes.width) * stream), Work((4 * FP32 + sizes.width) * stream)
    read, overwritten = LOSS_BYTES_OF_PARTS if config.parallel.tensor > 1 else (2 * sizes.width, 0)
    loss = sizes.whole * V
    there, back = [norm, product, Work(read * loss)], [gradients, product, product, Work(overwritten * loss)]
    if model.mtp.pattern:
        before = Work(6 * sizes.width * stream, 4 * model.hidden_size * stream)
        there, back = [*there, *there, before], [*back, *back, before, before]
    return _seconds(config, gpu, there, back)


def _seconds(config: RunConfig, gpu: Gpu, forward: list[Work], backward: list[Work]) -> MicroBatch:
    precision = config.training.precision
    return MicroBatch(*(sum(roofline.seconds(work, gpu, precision) for work in way) for way in (forward, backward)))


def _in_fp8(operations: list[Work], share: float, gpu: Gpu) -> list[Work]:
    """Return the operations with a share of their products in FP8. A router's small product counts like the others."""
    faster = 1 - share * (1 - gpu.reached("bf16") / gpu.reached("fp8"))
    rounding = sum(ROUNDED * share * work.moved for work in operations if work.flops)
    return [replace(work, flops=faster * work.flops) for work in operations] + [Work(rounding)]


def _exposed(config: RunConfig, seconds: dict[str, float], state: State, batch: MicroBatch) -> dict[str, float]:
    """Return the time of reducing gradients and gathering weights that the last backward and first forward pass do
    not hide, by axis; the axes share the links, so their times add up."""
    whole = sum(seconds.values())
    if not config.training.overlap or not whole:
        return seconds
    reducing = whole
    if config.optimizer.distributed:
        reducing *= state.gradients / (state.gradients + state.weights)
    exposed = max(0.0, reducing - batch.backward) + max(0.0, whole - reducing - batch.forward)
    return {axis: exposed * each / whole for axis, each in seconds.items()}
