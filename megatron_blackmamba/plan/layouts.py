"""Layouts of a given number of GPUs, ranked: those that work and fit, the fastest by this estimate first."""

from dataclasses import dataclass
from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan import flops, memory, traffic
from megatron_blackmamba.plan.gpus import Gpu
from megatron_blackmamba.runtime import layout
from megatron_blackmamba.runtime.layout import Layout

RECOMPUTE = ("none", "experts", "layers")


@dataclass(frozen=True)
class Candidate:
    """One way to run, what it takes and how fast it might be."""

    layout: Layout
    recompute: str
    memory_gib: float
    seconds_per_step: float
    """Computing at the MFU, the pipeline's idle ends, and traffic at link speed; gradients hide behind computing."""

    def overrides(self, config: RunConfig) -> str:
        """Return the command-line overrides for this layout."""
        changed = self.layout.overrides(config)
        recompute = f"training.recompute={self.recompute}" if self.recompute != config.training.recompute else ""
        return " ".join(part for part in (changed, recompute) if part) or "(as it is)"

    def as_json(self, config: RunConfig) -> dict[str, Any]:
        return {
            "overrides": self.overrides(config),
            **self.layout.parallel.model_dump(),
            "micro_batch": self.layout.micro_batch,
            "recompute": self.recompute,
            "memory_gib": round(self.memory_gib, 3),
            "seconds_per_step": self.seconds_per_step,
        }


def suggest(
    config: RunConfig, world_size: int, gpus_per_node: int, gpu: Gpu, mfu: float, count: int = 5
) -> list[Candidate]:
    """Return the best `count` layouts that fit, each with as little recomputation as possible.

    Memory is looked at in the order of a bound that needs no model, until no layout left can be faster.
    """

    def bound(found: Layout) -> float:
        plain = with_layout(config, found, "none")
        moved = traffic.flows(plain, world_size, gpus_per_node, gpu)
        return _seconds(plain, world_size, gpu, mfu, moved)

    bounds = [
        (bound(found), number, found)
        for number, found in enumerate(layout.working_layouts(config, world_size))
        if found.parallel.tensor <= gpus_per_node
    ]
    best: list[Candidate] = []
    for fastest_possible, _, found in sorted(bounds):
        if len(best) == count and fastest_possible >= best[-1].seconds_per_step:
            break
        candidate = _least_recomputing(config, found, world_size, gpus_per_node, gpu, mfu)
        if candidate is not None:
            best = sorted([*best, candidate], key=lambda c: (c.seconds_per_step, c.memory_gib))[:count]
    return best


def with_layout(config: RunConfig, found: Layout, recompute: str) -> RunConfig:
    """Return the run config with this layout."""
    training = config.training.model_copy(update={"micro_batch": found.micro_batch, "recompute": recompute})
    return config.model_copy(update={"parallel": found.parallel, "training": training})


def _least_recomputing(
    config: RunConfig, found: Layout, world_size: int, gpus_per_node: int, gpu: Gpu, mfu: float
) -> Candidate | None:
    for recompute in RECOMPUTE:
        changed = with_layout(config, found, recompute)
        if memory.beside_state(changed, world_size) > gpu.memory_gib * memory.GIB:
            continue
        full, _ = memory.fullest(changed, world_size)
        if full.total <= gpu.memory_gib * memory.GIB:
            state = memory.State(full.weights, full.gradients, full.optimizer)
            moved = traffic.flows(changed, world_size, gpus_per_node, gpu, state)
            seconds = _seconds(changed, world_size, gpu, mfu, moved)
            return Candidate(found, recompute, full.total / memory.GIB, seconds)
    return None


def _seconds(config: RunConfig, world_size: int, gpu: Gpu, mfu: float, moved: dict[str, traffic.Flow]) -> float:
    work = flops.training(config.model, config.data.sequence_length) + flops.recomputed(config)
    computing = config.tokens_per_step * work / (world_size * gpu.peak(config.training.precision) * mfu)
    idle = (config.parallel.pipeline - 1) / layout.micro_batches(config, world_size)
    hidden = moved["data"].seconds if "data" in moved else 0.0
    waiting = sum(flow.seconds for axis, flow in moved.items() if axis != "data")
    return computing * (1 + idle) + waiting + (max(0.0, hidden - computing) if config.training.overlap else hidden)
