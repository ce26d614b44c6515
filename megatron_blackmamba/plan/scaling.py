"""More nodes: with the same batch (strong scaling), and with a batch that grows with them (weak scaling)."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan import memory
from megatron_blackmamba.plan.gpus import Gpu
from megatron_blackmamba.plan.layouts import Cluster, time_of
from megatron_blackmamba.runtime import layout

ROWS = 6


@dataclass(frozen=True)
class Row:
    """A number of nodes, and the step's time on them at best."""

    nodes: int
    global_batch: int
    seconds_per_step: float
    tokens_per_second: float
    efficiency: float
    """Tokens per second and node, relative to the first row."""


def strong(config: RunConfig, nodes: tuple[int, ...], gpus_per_node: int, gpu: Gpu) -> list[Row]:
    """Return a row for each of these node counts, all with the run's own batch."""
    return _rows(((size, config) for size in nodes[:ROWS]), gpus_per_node, gpu)


def weak(config: RunConfig, nodes: int, gpus_per_node: int, gpu: Gpu) -> list[Row]:
    """Return a row for each power of two of nodes on which the layout works, each GPU with as many sequences as the
    batch gives it on `nodes` nodes."""
    return _rows(_grown(config, nodes, gpus_per_node), gpus_per_node, gpu)


def _grown(config: RunConfig, nodes: int, gpus_per_node: int) -> Iterator[tuple[int, RunConfig]]:
    for power in range(ROWS):
        batch, rest = divmod(config.training.global_batch * 2**power, nodes)
        training = config.training.model_copy(update={"global_batch": batch, "batch_ramp": []})
        grown = config.model_copy(update={"training": training})
        if not rest and not layout.problems(grown, 2**power * gpus_per_node):
            yield 2**power, grown


def _rows(runs: Iterator[tuple[int, RunConfig]], gpus_per_node: int, gpu: Gpu) -> list[Row]:
    """Return a row for each of these runs that fits."""
    rows: list[Row] = []
    for nodes, config in runs:
        cluster = Cluster(nodes * gpus_per_node, gpus_per_node, gpu)
        full, _ = memory.fullest(config, cluster.world_size)
        if full.total > cluster.memory:
            continue
        seconds = time_of(config, cluster, full.state).total
        speed = config.tokens_per_step / seconds
        first = rows[0].tokens_per_second / rows[0].nodes if rows else speed / nodes
        rows.append(Row(nodes, config.training.global_batch, seconds, speed, speed / nodes / first))
    return rows
