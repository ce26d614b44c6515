"""Bytes that one GPU sends in one step, by kind of parallelism, and the links they cross.

A ring or all-to-all over n ranks sends (n - 1) / n of the data. Ranks are numbered as megatron-core does: tensor inside
expert inside data inside pipeline, so a group is `size` ranks, `stride` apart.
"""

from dataclasses import dataclass

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan.activations import FP32, Activations
from megatron_blackmamba.plan.gpus import Gpu
from megatron_blackmamba.plan.memory import State
from megatron_blackmamba.runtime import layout


@dataclass(frozen=True)
class Flow:
    """What one kind of parallelism moves."""

    gigabytes: float
    """Sent by one GPU in one step."""
    link: str
    """nvlink: all groups lie inside a node; network: some reach beyond."""
    ranks: int
    seconds: float
    """At the link's full speed."""


def flows(
    config: RunConfig, world_size: int, gpus_per_node: int, gpu: Gpu, state: State | None = None
) -> dict[str, Flow]:
    """By name of the axis; axes of one rank move nothing and are left out, and `data` where no state is given."""
    p = config.parallel
    data = layout.data_parallel_size(p, world_size)
    expert_data = world_size // (p.pipeline * p.expert * p.expert_tensor)
    sent = {
        "tensor": (_tensor(config, world_size), 1, p.tensor),
        "expert": (_expert(config, world_size), p.expert_tensor, p.expert),
        "expert_tensor": (_expert_tensor(config, world_size), 1, p.expert_tensor),
        "pipeline": (_pipeline(config, world_size), world_size // p.pipeline, p.pipeline),
        "data": (_data(config, state, data, expert_data) if state else 0.0, p.tensor, data),
    }
    result = {}
    for axis, (volume, stride, ranks) in sent.items():
        if ranks > 1 and volume:
            inside = _inside_nodes(stride, ranks, world_size, gpus_per_node)
            speed = 1e9 * (gpu.nvlink_gb_s if inside else gpu.network_gb_s)
            result[axis] = Flow(volume / 1e9, "nvlink" if inside else "network", ranks, volume / speed)
    return result


def _inside_nodes(stride: int, ranks: int, world_size: int, gpus_per_node: int) -> bool:
    """Whether no group of `ranks` ranks, `stride` apart, touches two nodes."""
    reach = stride * ranks
    return all(
        (first // gpus_per_node) == ((first + stride * (ranks - 1)) // gpus_per_node)
        for block in range(0, world_size, reach)
        for first in range(block, min(block + stride, world_size))
    )


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


def _letters_of_a_stage(config: RunConfig) -> dict[str, float]:
    return {letter: config.model.pattern.count(letter) / config.parallel.pipeline for letter in "ME*-"}


def _passes(config: RunConfig, letter: str) -> int:
    """Forward, backward, and the forward that recomputation repeats."""
    recompute = config.training.recompute
    return 3 if recompute == "layers" or (recompute == "experts" and letter == "E") else 2


def _tensor(config: RunConfig, world_size: int) -> float:
    """Around each split block the stream is gathered and scattered, forward and backward, and gathered once more for
    the weight gradient; the Mamba block's dt, B and C are summed; the head gathers its input."""
    model, sizes, ranks = config.model, Activations(config, "cuda"), config.parallel.tensor
    stream = sizes.tokens.whole * model.hidden_size * sizes.width
    shared = sizes.tokens.whole * (model.dt_rank_or_default + 2 * model.state_size) * sizes.width
    blocks = _letters_of_a_stage(config)
    volume: float = 3 * stream  # the head; the embedding of the first stage moves less
    for letter in "M*-":
        volume += blocks[letter] * (2 * _passes(config, letter) + 1) * stream
    volume += blocks["M"] * _passes(config, "M") * 2 * shared
    return _part(ranks) * volume * layout.micro_batches(config, world_size)


def _expert(config: RunConfig, world_size: int) -> float:
    """Tokens go to their experts and back, forward and backward."""
    model, sizes = config.model, Activations(config, "cuda")
    tokens = sizes.tokens.here * model.top_k
    crossings = 2 * _passes(config, "E") * _letters_of_a_stage(config)["E"]
    each = tokens * (model.hidden_size * sizes.width + FP32)
    return _part(config.parallel.expert) * crossings * each * layout.micro_batches(config, world_size)


def _expert_tensor(config: RunConfig, world_size: int) -> float:
    """The tokens of an expert are gathered on the ranks that share it, and its outputs summed back."""
    model, sizes, ranks = config.model, Activations(config, "cuda"), config.parallel.expert_tensor
    stream = sizes.tokens.routed * model.hidden_size * sizes.width
    crossings = 2 * _passes(config, "E") * _letters_of_a_stage(config)["E"]
    return _part(ranks) * crossings * stream * layout.micro_batches(config, world_size)


def _pipeline(config: RunConfig, world_size: int) -> float:
    """The fp32 residual stream forward, its gradient backward."""
    return 2 * Activations(config, "cuda").residual() * layout.micro_batches(config, world_size)


def _data(config: RunConfig, state: State, data: int, expert_data: int) -> float:
    """Gradients are reduce-scattered in fp32 and weights gathered, or without the distributed optimizer all-reduced."""
    part = _part(max(data, expert_data))
    if config.optimizer.distributed:
        return part * (state.gradients + state.weights)
    return 2 * part * state.gradients
