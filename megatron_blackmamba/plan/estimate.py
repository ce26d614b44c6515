"""A run's plan, put together: what needs no layout, and with nodes given, memory, traffic, time and layouts."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.formats.reads import refusal, reread
from megatron_blackmamba.plan import flops, layouts, memory, parameters, scaling, storage, times, traffic
from megatron_blackmamba.plan.advice import advice
from megatron_blackmamba.plan.goodput import FAILURES, RESTART_MINUTES, Goodput, goodput
from megatron_blackmamba.plan.gpus import Gpu
from megatron_blackmamba.plan.layouts import Candidate, Cluster
from megatron_blackmamba.plan.lengths import Length, for_lengths
from megatron_blackmamba.plan.memory import Memory
from megatron_blackmamba.plan.parameters import Parameters
from megatron_blackmamba.plan.stages import Beginning, Stage, stages_of, timed, with_batch
from megatron_blackmamba.plan.times import StepTime
from megatron_blackmamba.plan.traffic import Flow
from megatron_blackmamba.runtime import layout


@dataclass(frozen=True)
class Source:
    """One source of the mixture over the whole run."""

    name: str
    probability: float
    tokens: int
    epochs: float
    """With what the trunk of a branch has read."""
    max_epochs: float | None = None
    tokens_before: int = 0
    """Those that the trunk of a branch has read."""


@dataclass(frozen=True)
class Asked:
    """The nodes to plan for, and what to say about them."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    mfu: float | None = None
    """As measured; None: the time at best is calculated."""
    suggest: bool = False
    scaling: bool = False
    lengths: tuple[int, ...] = ()
    """Lengths of sequences to propose layouts for."""
    failures: float = FAILURES
    restart_minutes: float = RESTART_MINUTES
    gpu_option: str = "h100"
    """The value of --gpu, for commands in messages."""

    @property
    def options(self) -> str:
        """The options of `plan` for these nodes."""
        return f"--nodes {self.nodes} --gpus-per-node {self.gpus_per_node} --gpu {shlex.quote(self.gpu_option)}"


@dataclass(frozen=True)
class Placed:
    """The run on given nodes."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    refused: tuple[str, ...]
    """Why the layout is refused; none: it works."""
    advice: str
    options: str
    """The options of `plan` for these nodes."""
    fitting_nodes: tuple[int, ...]
    """Node counts on which the layout works as it is."""
    memory: Memory | None = None
    fullest_rank: int = 0
    activations_by_recompute: dict[str, int] | None = None
    flows: dict[str, Flow] | None = None
    time: StepTime | None = None
    """At best, calculated."""
    mfu: float = 0.0
    mfu_is_calculated: bool = True
    """From the time at best, because none was given."""
    seconds_per_step: float = 0.0
    """With training.global_batch."""
    seconds: float = 0.0
    """The time of all steps, those with smaller batches too."""
    stages: tuple[Stage, ...] = ()
    goodput: Goodput | None = None
    suggestions: tuple[Candidate, ...] = ()
    strong_scaling: tuple[scaling.Row, ...] = ()
    weak_scaling: tuple[scaling.Row, ...] = ()
    lengths: tuple[Length, ...] = ()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def fits(self) -> bool:
        """Return whether the layout is valid and fits into the memory of its fullest GPU."""
        return self.memory is not None and self.memory.total <= self.gpu.memory_gib * memory.GIB


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    parameters: Parameters
    sources: tuple[Source, ...]
    missing_data: str | None
    """Why the sources are not known, if they are not."""
    refused_data: str | None
    """Why training would refuse the data that are there, if so."""
    placed: Placed | None
    begins: Beginning
    stages: tuple[Stage, ...]
    """One, or several if the batch grows; with times if placed."""

    @property
    def steps(self) -> int:
        """Return the number of steps; a branch does not take those of its trunk."""
        return sum(stage.steps for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Return the tokens of these steps; the last batch may exceed training.tokens."""
        return sum(stage.tokens for stage in self.stages)


def make_plan(config: RunConfig, asked: Asked | None = None, begins: Beginning | None = None) -> Plan:
    """Return everything that is known about a run before it starts; memory, traffic and time only for given nodes.

    begins: The checkpoint that a branch leaves its trunk at.
    """
    begins = begins or Beginning()
    stages = stages_of(config, begins)
    sources, missing, refused = _sources(config, begins)
    placed = None if asked is None else _place(config, asked, stages)
    stages = placed.stages if placed and placed.stages else stages
    return Plan(config, parameters.count(config), sources, missing, refused, placed, begins, stages)


def _place(config: RunConfig, asked: Asked, stages: tuple[Stage, ...]) -> Placed:
    gpu, gpus_per_node = asked.gpu, asked.gpus_per_node
    cluster = Cluster(asked.nodes * gpus_per_node, gpus_per_node, gpu)
    world_size = cluster.world_size
    refused = tuple(layout.problems(config, world_size))
    sizes = range(gpus_per_node, _most_useful(config, world_size) + 1, gpus_per_node)
    fitting = tuple(size // gpus_per_node for size in layout.fitting_sizes(config, sizes))
    common: dict[str, Any] = {
        "nodes": asked.nodes,
        "gpus_per_node": gpus_per_node,
        "gpu": gpu,
        "refused": refused,
        "advice": advice(config, cluster, fitting) if refused else "",
        "options": asked.options,
        "fitting_nodes": fitting,
    }
    if asked.suggest:
        found = [*layouts.suggest(config, cluster), *layouts.with_near_batches(config, cluster)]
        common["suggestions"] = tuple(sorted(found, key=lambda each: -each.tokens_per_second(config)))
    common["lengths"] = tuple(for_lengths(config, cluster, asked.lengths))
    if refused:
        return Placed(**common)
    full, rank = memory.fullest(config, world_size)
    moved = traffic.flows(config, world_size, gpus_per_node, gpu, full.state)
    stage = rank * config.parallel.pipeline // world_size
    waiting = memory.in_flight(config, world_size, stage)
    best = times.of_step(config, world_size, gpu, moved, full.state)
    mfu = asked.mfu or best.mfu(config, world_size, gpu)
    seconds = times.at_peak(config, world_size, gpu) / mfu

    def seconds_of(stage: Stage) -> float:
        if stage.global_batch == config.training.global_batch:
            return seconds
        smaller = with_batch(config, stage)
        if asked.mfu is not None:
            return times.at_peak(smaller, world_size, gpu) / asked.mfu
        moved = traffic.flows(smaller, world_size, gpus_per_node, gpu, full.state)
        return times.of_step(smaller, world_size, gpu, moved, full.state).total

    stages = tuple(timed(stage, seconds_of(stage)) for stage in stages)
    whole = sum(stage.steps * (stage.seconds_per_step or 0.0) for stage in stages)
    interval = min(whole, config.checkpoint.every * seconds or whole)
    if asked.scaling:
        common["strong_scaling"] = tuple(scaling.strong(config, common["fitting_nodes"], gpus_per_node, gpu))
        common["weak_scaling"] = tuple(scaling.weak(config, asked.nodes, gpus_per_node, gpu))
    return Placed(
        **common,
        memory=full,
        fullest_rank=rank,
        activations_by_recompute={
            how: waiting * memory.kept(config, stage, how, "cuda") for how in ("none", "experts", "layers")
        },
        flows=moved,
        time=best,
        mfu=mfu,
        mfu_is_calculated=asked.mfu is None,
        seconds_per_step=seconds,
        seconds=whole,
        stages=stages,
        goodput=goodput(interval, asked.nodes, asked.failures, asked.restart_minutes),
    )


def _most_useful(config: RunConfig, world_size: int) -> int:
    """Return four times these GPUs, but at most one data-parallel rank per sequence."""
    return min(4 * world_size, config.training.global_batch * layout.ranks_of_a_replica(config.parallel))


def _sources(config: RunConfig, begins: Beginning) -> tuple[tuple[Source, ...], str | None, str | None]:
    samples = config.samples_left(begins.consumed_samples)
    if config.data.kind == "synthetic":
        share = 1 / config.data.synthetic.sources
        tokens = samples * config.data.sequence_length
        names = [f"synthetic_{i}" for i in range(config.data.synthetic.sources)]
        return tuple(Source(name, share, round(share * tokens), 0.0) for name in names), None, None
    from megatron_blackmamba.data_tools.mixture import plan_mixture
    from megatron_blackmamba.formats.mixture import Mixture, MixtureError

    mixture = Path(config.data.mixture or "")
    if not mixture.is_file():
        return (), f"{mixture}: no such mixture file", None
    length = config.data.sequence_length
    try:
        read = begins.mixture or Mixture.read(mixture)
        end = begins.end_of_data or begins.next_sample + samples
        planned = plan_mixture(read, end * length, length, run=config, first_sample=begins.next_sample)
    except MixtureError as error:
        return (), None, str(error)
    missing = None
    if planned.missing:  # of many sources mostly for one reason
        missing = f"no shards of {', '.join(planned.missing)}: {next(iter(planned.missing.values())).splitlines()[0]}"
    refused = None
    try:
        planned.check()
    except MixtureError as error:
        refused = str(error)
    again = reread({s.name: (s.read_again, s.samples * length) for s in planned.sources})
    if again and begins.relength and not config.start.reread:
        refused = refused or refusal(length, again)
    sources = (
        Source(
            s.name, s.probability, (s.samples - s.before) * length, s.epochs, s.max_epochs, s.read + s.before * length
        )
        for s in planned.sources
    )
    return tuple(sources), missing, refused


def storage_of(plan: Plan) -> storage.Storage:
    """Return the disk space of the run; the corpus counts what is known of its sources."""
    corpus = sum((source.tokens + source.tokens_before) / source.epochs for source in plan.sources if source.epochs)
    return storage.of_run(plan.config, corpus, plan.begins.step, plan.steps)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values: sizes in GiB, times in seconds, hours and days."""
    config, model, begins = plan.config, plan.config.model, plan.begins
    length = config.data.sequence_length
    per_token = flops.training(model, length)
    paper = flops.paper_formula(model, config.tokens_per_step)
    tokens = plan.tokens
    answer: dict[str, Any] = {
        "name": config.name,
        "parameters": asdict(plan.parameters),
        "flops": {
            "forward_per_token_by_part": flops.forward_by_part(model, length),
            "training_per_token": per_token,
            "recomputed_per_token": flops.recomputed(config),
            "training_total": per_token * tokens,
            "paper_formula_printed_total": paper and 3 * paper.printed * tokens,
            "paper_formula_repaired_total": paper and 3 * paper.repaired * tokens,
            "paper_table_total": flops.published(config),
        },
        "training": {
            "steps": plan.steps,
            "tokens": tokens,
            "tokens_per_step": config.tokens_per_step,
            "warmup_steps": config.warmup_steps,
            **({"decay_steps": config.decay_steps} if config.optimizer.decay == "wsd" else {}),
            **({"stages": [asdict(stage) for stage in plan.stages]} if config.training.batch_ramp else {}),
            **({"trunk": str(begins.trunk), "trunk_step": begins.step} if begins.trunk else {}),
        },
        "data": {
            "sources": [asdict(source) for source in plan.sources],
            "missing": plan.missing_data,
            "refused": plan.refused_data,
        },
    }
    answer["storage"] = asdict(storage_of(plan)) | {"checkpoints": storage_of(plan).checkpoints}
    return answer | (_placed_as_json(plan.placed, config) if plan.placed else {})


def _placed_as_json(placed: Placed, config: RunConfig) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "layout": {
            **config.parallel.model_dump(),
            "data": layout.data_parallel_size(config.parallel, placed.gpus),
            "nodes": placed.nodes,
            "gpus_per_node": placed.gpus_per_node,
            "gpu": placed.gpu.name,
            "works": not placed.refused,
            "fits": placed.fits,
            "refused": list(placed.refused),
            "advice": placed.advice,
            "routing": layout.routing(config, placed.gpus),
            "fitting_nodes": list(placed.fitting_nodes),
            "suggestions": [candidate.as_json(config) for candidate in placed.suggestions],
            "lengths": [length.as_json() for length in placed.lengths],
        }
    }
    if placed.memory is None or placed.flows is None or placed.activations_by_recompute is None:
        return answer
    assert placed.time and placed.goodput
    answer["memory_per_gpu_gib"] = placed.memory.in_gib() | {
        "available": placed.gpu.memory_gib,
        "fullest_rank": placed.fullest_rank,
        "activations_by_recompute": {
            how: round(size / memory.GIB, 3) for how, size in placed.activations_by_recompute.items()
        },
    }
    seconds = placed.seconds
    answer["traffic_per_gpu_per_step"] = {axis: asdict(flow) for axis, flow in placed.flows.items()}
    lost = placed.goodput
    answer["time"] = {
        "mfu": placed.mfu,
        "mfu_is_calculated": placed.mfu_is_calculated,
        "seconds_per_step": placed.seconds_per_step,
        "seconds_per_step_at_best": asdict(placed.time) | {"total": placed.time.total},
        "tokens_per_second": config.tokens_per_step / placed.seconds_per_step,
        "days": seconds / 86400,
        "gpu_hours": seconds / 3600 * placed.gpus,
        "goodput": asdict(lost) | {"share": lost.share, "days_with_failures": seconds / lost.share / 86400},
    }
    if placed.strong_scaling:
        answer["scaling"] = {
            "strong": [asdict(row) for row in placed.strong_scaling],
            "weak": [asdict(row) for row in placed.weak_scaling],
        }
    return answer
