"""Layouts of a given number of GPUs, ranked: those that work and fit, the fastest by this estimate first.

Each layout takes the micro-batch and the recomputation that make it fastest within the GPU's memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan import memory, times, traffic
from megatron_blackmamba.plan.gpus import Gpu
from megatron_blackmamba.plan.times import StepTime
from megatron_blackmamba.runtime import layout
from megatron_blackmamba.runtime.layout import Layout

RECOMPUTE = ("none", "experts", "layers")
AS_IT_IS = "(as it is)"


@dataclass(frozen=True)
class Candidate:
    """One way to run, its memory and its time at best."""

    layout: Layout
    recompute: str
    memory_gib: float
    time: StepTime

    @property
    def seconds_per_step(self) -> float:
        return self.time.total

    def tokens_per_second(self, config: RunConfig) -> float:
        """Return the speed of all GPUs together."""
        sequences = self.layout.global_batch or config.training.global_batch
        return sequences * config.data.sequence_length / self.seconds_per_step

    def overrides(self, config: RunConfig) -> str:
        """Return the command-line overrides for this layout."""
        changed = self.layout.overrides(config)
        recompute = f"training.recompute={self.recompute}" if self.recompute != config.training.recompute else ""
        return " ".join(part for part in (changed, recompute) if part) or AS_IT_IS

    def as_json(self, config: RunConfig) -> dict[str, Any]:
        return {
            "overrides": self.overrides(config),
            **self.layout.parallel.model_dump(),
            "micro_batch": self.layout.micro_batch,
            "recompute": self.recompute,
            "memory_gib": round(self.memory_gib, 3),
            "global_batch": self.layout.global_batch or config.training.global_batch,
            "seconds_per_step": self.seconds_per_step,
            "tokens_per_second": self.tokens_per_second(config),
            "why": self.time.described(),
        }


@dataclass(frozen=True)
class Cluster:
    """The GPUs to lay a run over."""

    world_size: int
    gpus_per_node: int
    gpu: Gpu

    @property
    def memory(self) -> float:
        """Bytes of one GPU."""
        return self.gpu.memory_gib * memory.GIB


def suggest(config: RunConfig, cluster: Cluster, count: int = 5) -> list[Candidate]:
    """Return the best `count` layouts that fit, each with its fastest micro-batch and recomputation.

    A layout's real model is built only until no layout left can be faster, by a bound that needs no model.
    """
    bounds = []
    for number, found in enumerate(layout.working_layouts(config, cluster.world_size, cluster.gpus_per_node)):
        sized = list(_sized(config, found, cluster.world_size))
        fastest = min(time_of(with_layout(config, one, "none"), cluster, None).total for one in sized)
        bounds.append((fastest, number, sized))
    best: list[Candidate] = []
    for fastest_possible, _, sized in sorted(bounds, key=lambda bound: bound[:2]):
        if len(best) == count and fastest_possible >= best[-1].seconds_per_step:
            break
        best = sorted([*best, *_fastest(config, sized, cluster)], key=_order)[:count]
    return best


def with_near_batches(config: RunConfig, cluster: Cluster) -> list[Candidate]:
    """Return the config's own layout with the nearest batches that it divides, if it does not divide its own."""
    near = layout.nearest_batches(config, cluster.world_size)
    sized = [list(_sized(config, found, cluster.world_size)) for found in near]
    return [candidate for sizes in sized for candidate in _fastest(config, sizes, cluster)]


def on_fewer_nodes(config: RunConfig, cluster: Cluster) -> tuple[int, Candidate] | None:
    """Return the most nodes below the cluster's on which at most the micro-batch has to change, and its fastest one."""
    for nodes in range(cluster.world_size // cluster.gpus_per_node - 1, 0, -1):
        fewer = replace(cluster, world_size=nodes * cluster.gpus_per_node)
        found = layout.with_own_batch(config, fewer.world_size)
        fitting = _fastest(config, list(_sized(config, found, fewer.world_size)), fewer) if found else []
        if fitting:
            return nodes, fitting[0]
    return None


def _fastest(config: RunConfig, sized: list[Layout], cluster: Cluster) -> list[Candidate]:
    """Return the fastest of a layout's micro-batches that fit, as a list of one; empty if none fits."""
    fitting = [candidate for one in sized if (candidate := _least_recomputing(config, one, cluster))]
    return sorted(fitting, key=_order)[:1]


def _order(candidate: Candidate) -> tuple[float, float]:
    return candidate.seconds_per_step, candidate.memory_gib


def _sized(config: RunConfig, found: Layout, world_size: int) -> Iterator[Layout]:
    """Return the layout with each micro-batch that divides a rank's sequences."""
    share = math.gcd(*found.batches(config)) // layout.data_parallel_size(found.parallel, world_size)
    sizes = (size for size in range(1, share + 1) if share % size == 0 and not layout.loses_bits(config, share // size))
    return (replace(found, micro_batch=size) for size in sizes)


def _least_recomputing(config: RunConfig, found: Layout, cluster: Cluster) -> Candidate | None:
    """Return the layout with as little recomputation as it needs to fit; None: it does not fit."""
    for recompute in RECOMPUTE:
        changed = with_layout(config, found, recompute)
        if memory.beside_state(changed, cluster.world_size) > cluster.memory:
            continue
        full, _ = memory.fullest(changed, cluster.world_size)
        if full.total <= cluster.memory:
            return Candidate(found, recompute, full.total / memory.GIB, time_of(changed, cluster, full.state))
    return None


def time_of(config: RunConfig, cluster: Cluster, state: memory.State | None) -> StepTime:
    """Return the time of a step; without the state, a lower bound that needs no model."""
    moved = traffic.flows(config, cluster.world_size, cluster.gpus_per_node, cluster.gpu, state)
    return times.of_step(config, cluster.world_size, cluster.gpu, moved, state)


def with_layout(config: RunConfig, found: Layout, recompute: str) -> RunConfig:
    """Return the run config with this layout."""
    changed: dict[str, Any] = {"micro_batch": found.micro_batch, "recompute": recompute}
    if found.global_batch is not None:
        changed["global_batch"] = found.global_batch
    changed["batch_ramp"] = found.stages(config)
    training = config.training.model_copy(update=changed)
    return config.model_copy(update={"parallel": found.parallel, "training": training})
