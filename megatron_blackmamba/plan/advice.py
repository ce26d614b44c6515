"""Layouts that work instead of a refused one, each with its speed at best."""

from collections.abc import Sequence

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.plan import layouts, memory
from megatron_blackmamba.plan.layouts import Cluster

LAYOUTS = 3
NODE_COUNTS = 3


def advice(config: RunConfig, cluster: Cluster, fitting_nodes: Sequence[int]) -> str:
    """Return what fits and works, a line each: other batches, other layouts, other node counts."""
    nodes = cluster.world_size // cluster.gpus_per_node
    batches = layouts.with_near_batches(config, cluster)
    found = [(nodes, each) for each in (*batches, *layouts.suggest(config, cluster, LAYOUTS))]
    fewer = layouts.on_fewer_nodes(config, cluster)
    if fewer and fewer[1].overrides(config) != layouts.AS_IT_IS:  # those are listed below
        found.append(fewer)
    lines = [
        f"{each.overrides(config)} on {_nodes(count)}: {_speed(each.seconds_per_step, each.tokens_per_second(config))}"
        for count, each in found
    ]
    near = sorted(sorted(fitting_nodes, key=lambda count: abs(count - nodes))[:NODE_COUNTS])
    lines += [f"as it is on {_nodes(count)}: {speed}" for count in near if (speed := _as_it_is(config, cluster, count))]
    if not lines:
        return "What works: nothing near it. Try another number of nodes or another training.global_batch."
    said = "\n  ".join(["What works (calculated, at best):", *lines])
    return f"{said}\nAnother training.global_batch trains another model: steps and noise change." if batches else said


def _as_it_is(config: RunConfig, cluster: Cluster, nodes: int) -> str:
    """Return the speed of the unchanged run on other nodes; empty if it does not fit."""
    other = Cluster(nodes * cluster.gpus_per_node, cluster.gpus_per_node, cluster.gpu)
    full, _ = memory.fullest(config, other.world_size)
    if full.total > other.memory:
        return ""
    seconds = layouts.time_of(config, other, full.state).total
    return _speed(seconds, config.tokens_per_step / seconds)


def _speed(seconds: float, tokens_per_second: float) -> str:
    return f"{seconds:.3f} s a step, {tokens_per_second:,.0f} tokens a second"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
