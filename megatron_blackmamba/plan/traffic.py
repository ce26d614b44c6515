"""Bytes that one GPU sends in one step, by kind of parallelism, and the links they cross.

A ring or all-to-all over n ranks sends (n - 1) / n of the data. Ranks are numbered as megatron-core does: tensor inside
context inside expert inside data inside pipeline, so a group is `size` ranks, `stride` apart. Gradients and weights of
experts go only to the ranks with the same experts, which are further apart than the data-parallel ranks of the rest.
"""

from collections import Counter
from dataclasses import dataclass

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.layers import kind_of
from megatron_blackmamba.plan.activations import Activations, sizes_of
from megatron_blackmamba.plan.gpus import Gpu
from megatron_blackmamba.plan.memory import State
from megatron_blackmamba.runtime import layout

DATA_AXES = ("data", "expert_data")
"""Axes over which gradients are reduced and weights gathered, once in a step."""
CALLS_A_PASS = 2
"""Collectives of a layer in a forward or backward pass, about: one before its computing and one after."""


@dataclass(frozen=True)
class Flow:
    """The traffic of one kind of parallelism."""

    gigabytes: float
    """Sent by one GPU in one step."""
    link: str
    """nvlink if all groups are inside a node, else network."""
    ranks: int
    seconds: float
    """At the links' full speed."""
    calls: float = 0.0
    """Collectives that a GPU takes part in, one after the other."""


def flows(
    config: RunConfig, world_size: int, gpus_per_node: int, gpu: Gpu, state: State | None = None
) -> dict[str, Flow]:
    """Return the traffic by axis, without axes of one rank, and without `DATA_AXES` if no state is given."""
    p = config.parallel
    data = layout.data_parallel_size(p, world_size) * p.context
    experts = p.expert * p.expert_tensor
    expert_data = world_size // (p.pipeline * experts)
    dense_bytes, expert_bytes = _exchanged(config, state) if state else (0.0, 0.0)
    layers, calls = _layers(config, world_size)
    sent = {
        "tensor": (layers["tensor"], 1, p.tensor),
        "expert": (layers["expert"], p.expert_tensor, p.expert),
        "expert_tensor": (layers["expert_tensor"], 1, p.expert_tensor),
        "context": (layers["context"], p.tensor, p.context),
        "pipeline": (_pipeline(config, world_size), world_size // p.pipeline, p.pipeline),
        "data": (_part(data) * dense_bytes, p.tensor, data),
        "expert_data": (_part(expert_data) * expert_bytes, experts, expert_data),
    }
    calls["pipeline"] = 2 * layout.micro_batches(config, world_size)
    result = {}
    for axis, (volume, stride, ranks) in sent.items():
        if ranks > 1 and volume:
            inside = _inside_nodes(stride, ranks, world_size, gpus_per_node)
            here = ranks if inside else max(1, min(ranks, gpus_per_node // stride))
            seconds = _seconds(axis, volume, ranks, here, gpu)
            result[axis] = Flow(volume / 1e9, "nvlink" if inside else "network", ranks, seconds, calls.get(axis, 0.0))
    return result


def _seconds(axis: str, volume: float, ranks: int, here: int, gpu: Gpu) -> float:
    """Return the time of what one GPU sends, when `here` of the group's ranks share its node.

    Each GPU of a node has its own share of the network. A ring crosses between nodes once per node, so the GPUs of a
    group carry it together. In an all-to-all, a GPU sends to all others itself, over both links at once.
    """
    nvlink, network = volume / (1e9 * gpu.nvlink_gb_s), volume / (1e9 * gpu.network_gb_s)
    if here == ranks:
        return nvlink
    if axis == "expert":
        return max(network * (ranks - here) / (ranks - 1), nvlink * (here - 1) / (ranks - 1))
    return network if axis == "pipeline" else max(network / here, nvlink)


def _inside_nodes(stride: int, ranks: int, world_size: int, gpus_per_node: int) -> bool:
    """Return whether every group of `ranks` ranks, `stride` apart, is inside one node."""
    reach = stride * ranks
    return all(
        (first // gpus_per_node) == ((first + stride * (ranks - 1)) // gpus_per_node)
        for block in range(0, world_size, reach)
        for first in range(block, min(block + stride, world_size))
    )


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


def _layers(config: RunConfig, world_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return what the layers of a stage, and the head, send in a step, and in how many collectives."""
    p, sizes = config.parallel, sizes_of(config, "cuda")
    moved = {"tensor": 3.0 * sizes.stream, "expert": 0.0, "expert_tensor": 0.0, "context": 0.0}
    calls = {"tensor": 3.0, "expert": 0.0, "expert_tensor": 0.0, "context": 0.0}
    # The head gathers its input; the embedding of the first stage moves less.
    for letter, layers in Counter(config.model.trained_pattern).items():
        kind = kind_of(letter)
        passes = 3 if config.training.recompute in kind.recompute else 2
        for axis, volume in kind.costs.traffic(sizes, passes).items():
            moved[axis] += layers * volume / p.pipeline
            calls[axis] += layers * CALLS_A_PASS * passes * bool(volume) / p.pipeline
    batches = layout.micro_batches(config, world_size)
    return (
        {axis: _part(getattr(p, axis)) * volume * batches for axis, volume in moved.items()},
        {axis: number * batches for axis, number in calls.items()},
    )


def _pipeline(config: RunConfig, world_size: int) -> float:
    """Return the traffic of the fp32 residual stream, and what is carried beside it, forward and its gradient back."""
    return 2 * Activations(config, "cuda").sent() * layout.micro_batches(config, world_size)


def _exchanged(config: RunConfig, state: State) -> tuple[float, float]:
    """Return the bytes of gradients (reduce-scattered) and weights (gathered), or of an all-reduce of gradients: of the
    dense part of the model, and of the experts that only some ranks have."""
    twice = state.weights if config.optimizer.distributed else state.gradients
    experts = state.expert_weights if config.optimizer.distributed else state.expert_gradients
    expert_bytes = state.expert_gradients + experts
    return state.gradients + twice - expert_bytes, expert_bytes
