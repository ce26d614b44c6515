"""Check which layouts work, by arithmetic alone: without torch and process groups."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from megatron_blackmamba import layers, routers
from megatron_blackmamba.config import ConfigError, ParallelConfig, RampStage, RunConfig

SHORTEST_PART = 8192
"""Cutting sequences into shorter parts than this is not suggested."""
LARGEST_TENSOR = 8
"""Beyond one node's GPUs tensor parallelism is too slow to be suggested; this many if the node is not known."""


LARGEST_SHOWN = 64
"""Divisors of a size are listed up to this."""
MOST_IN_BF16 = 32
"""Micro-batches whose gradients may be added up in bf16: the error is then 0.5% (docs/optimizers.md)."""


class LayoutError(ConfigError):
    """A layout that cannot work, or would train something else; the message names the numbers and one that works."""


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of ranks with different sequences; expert parallelism does not reduce it."""
    return world_size // ranks_of_a_replica(parallel)


def ranks_of_a_replica(parallel: ParallelConfig) -> int:
    """Return the number of ranks that work on the same sequences."""
    return parallel.tensor * parallel.context * parallel.pipeline


def micro_batches(config: RunConfig, world_size: int) -> int:
    """Return the number of micro-batches that each data-parallel rank accumulates per step."""
    data = data_parallel_size(config.parallel, world_size)
    return config.training.global_batch // (data * config.training.micro_batch)


@dataclass(frozen=True)
class Layout:
    """A way to lay one run over processes, with the micro-batch that fits it."""

    parallel: ParallelConfig
    micro_batch: int
    global_batch: int | None = None
    """Sequences in a step; None: as in the config."""
    ramp: tuple[int, ...] | None = None
    """Sequences in a step of each stage of training.batch_ramp; None: as in the config."""

    def overrides(self, config: RunConfig) -> str:
        """Return the command-line overrides that change `config` to this layout."""
        before = config.parallel.model_dump()
        changed = [f"parallel.{a}={size}" for a, size in self.parallel.model_dump().items() if before[a] != size]
        if self.global_batch not in (None, config.training.global_batch):
            changed.append(f"training.global_batch={self.global_batch}")
        if (stages := self.stages(config)) != config.training.batch_ramp:
            listed = ", ".join(f"{{batch: {stage.batch}, until: {stage.until}}}" for stage in stages)
            changed.append(f"'training.batch_ramp=[{listed}]'")
        if self.micro_batch != config.training.micro_batch:
            changed.append(f"training.micro_batch={self.micro_batch}")
        return " ".join(changed)

    def stages(self, config: RunConfig) -> list[RampStage]:
        """Return the ramp of the config with this layout's batches."""
        given = config.training.batch_ramp
        batches = [stage.batch for stage in given] if self.ramp is None else self.ramp
        return [stage.model_copy(update={"batch": batch}) for stage, batch in zip(given, batches, strict=True)]

    def batches(self, config: RunConfig) -> list[int]:
        """Return the global batches of a run with this layout."""
        return [*(stage.batch for stage in self.stages(config)), self.global_batch or config.training.global_batch]


def check(config: RunConfig, world_size: int) -> None:
    """Refuse a layout that cannot work or would be silently wrong, and name the nearest ones that work."""
    wrong = problems(config, world_size)
    if wrong:
        raise LayoutError("\n".join([*wrong, advice(config, world_size)]))


def routing(config: RunConfig, world_size: int) -> str:
    """Return why the choice of experts in training differs from that on one rank; empty if it does not."""
    model, parallel = config.model, config.parallel
    if not layers.routes(model.pattern):
        return ""
    answer = routers.kind_of(model.router.kind).layouts(model)
    data, replica = data_parallel_size(parallel, world_size), parallel.tensor * parallel.context
    ranks = {"rank": replica, "data": data}.get(model.router.scope, data * replica)
    return answer.reason if isinstance(answer, routers.Cannot) and ranks > 1 else ""


def refuse_parts(parallel: ParallelConfig) -> None:
    """Refuse a layout that divides the model, where every process holds a whole one."""
    sizes = {
        f"parallel.{axis}": getattr(parallel, axis)
        for axis in ("tensor", "pipeline", "context", "expert", "expert_tensor")
    }
    if divided := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        raise LayoutError(
            f"{', '.join(divided)}: `build` makes a whole model in each process, so these sizes must be 1."
            " Runs of `train` and `blackmamba train` divide models."
        )
    check_world(parallel, 1)


def check_world(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a number of processes that this layout cannot have; the part of `check` that needs no model."""
    wrong = _world_problems(parallel, world_size)
    if wrong:
        raise LayoutError("\n".join(wrong))


def problems(config: RunConfig, world_size: int) -> list[str]:
    """Return every reason against the config's layout on this many processes; empty if it works."""
    wrong = _layout_problems(config, config.parallel, world_size)
    if world_size % ranks_of_a_replica(config.parallel) == 0:
        wrong += _batch_problems(config, world_size)
    return wrong


def working_layouts(config: RunConfig, world_size: int, most_tensor: int = LARGEST_TENSOR) -> Iterator[Layout]:
    """Yield every valid layout of this many processes with at most the config's micro-batch, unless that is refused."""
    experts = config.model.experts if layers.routes(config.model.pattern) else 1
    batch = math.gcd(*config.batches)
    for tensor in [size for size in _divisors(world_size) if size <= most_tensor]:
        for pipeline, context in product(_divisors(world_size // tensor), _contexts(config)):
            dense = tensor * pipeline * context
            if world_size % dense or batch % (world_size // dense):
                continue
            share = batch // (world_size // dense)
            fitting = _micro_batch(config, share)
            for expert in _divisors(experts):
                for expert_tensor in _divisors(tensor) if experts > 1 else [1]:
                    parallel = ParallelConfig(
                        tensor=tensor, pipeline=pipeline, context=context, expert=expert, expert_tensor=expert_tensor
                    )
                    if not _layout_problems(config, parallel, world_size):
                        yield Layout(parallel, fitting)


def _contexts(config: RunConfig) -> list[int]:
    """Return the sizes of parallel.context to try: powers of two that leave long parts, and the config's own."""
    longest = config.data.sequence_length // SHORTEST_PART if layers.can_cut(config.model) else 1
    return sorted({1, config.parallel.context, *(2**n for n in range(1, longest.bit_length()))})


def nearest(config: RunConfig, world_size: int, count: int = 1) -> list[Layout]:
    """Return the working layouts that change least, one for each tensor × pipeline × context.

    Among equals, the least parallel one comes first.
    """
    wanted, micro = config.parallel, config.training.micro_batch

    def distance(layout: Layout) -> tuple[float, int, int]:
        axes = [(getattr(layout.parallel, axis), getattr(wanted, axis)) for axis in type(wanted).model_fields]
        changed = sum(abs(math.log2(new / old)) for new, old in axes)
        changed += 0.25 * math.log2(micro / layout.micro_batch)
        return changed, ranks_of_a_replica(layout.parallel), layout.parallel.pipeline

    found: dict[tuple[int, int, int], Layout] = {}
    for layout in sorted(working_layouts(config, world_size), key=distance):
        found.setdefault((layout.parallel.tensor, layout.parallel.pipeline, layout.parallel.context), layout)
    return list(found.values())[:count]


def nearest_batches(config: RunConfig, world_size: int) -> list[Layout]:
    """Return the config's own layout with batches next to its own that it can divide; none if it divides all."""
    data = data_parallel_size(config.parallel, world_size)
    batches = config.batches
    if _layout_problems(config, config.parallel, world_size) or not any(batch % data for batch in batches):
        return []
    found = {}
    for shares in ([max(1, batch // data) for batch in batches], [-(-batch // data) for batch in batches]):
        sizes = tuple(share * data for share in shares)
        found[sizes] = Layout(config.parallel, _micro_batch(config, math.gcd(*shares)), sizes[-1], sizes[:-1])
    return list(found.values())


def with_own_batch(config: RunConfig, world_size: int) -> Layout | None:
    """Return the config's own layout and batches with a micro-batch that divides them; None if no micro-batch does."""
    batch, wrong = math.gcd(*config.batches), _layout_problems(config, config.parallel, world_size)
    if wrong or batch % data_parallel_size(config.parallel, world_size):
        return None
    return Layout(config.parallel, _micro_batch(config, batch // data_parallel_size(config.parallel, world_size)))


def loses_bits(config: RunConfig, micro_batches: int) -> bool:
    """Return whether the config's precision is too low to add up the gradients of this many micro-batches."""
    return config.optimizer.gradients == "bf16" and micro_batches > MOST_IN_BF16


def why_no_graph(config: RunConfig, world_size: int) -> str:
    """Return why the micro-batches of a run on GPUs cannot be CUDA graphs, or an empty string."""
    if world_size > 1:
        return "only a process alone captures: exchanges between ranks, and measuring slow ones, need the host"
    if config.training.recompute != "none":
        return "training.recompute saves and restores the state of random numbers"
    return ""


def _micro_batch(config: RunConfig, share: int) -> int:
    """Return the largest micro-batch up to the config's that divides a rank's sequences; a larger one if needed."""
    sizes = [size for size in _divisors(share) if not loses_bits(config, share // size)]
    return max((size for size in sizes if size <= config.training.micro_batch), default=sizes[0])


def fitting_sizes(config: RunConfig, sizes: Iterable[int]) -> list[int]:
    """Return the world sizes on which the config works unchanged."""
    return [size for size in sizes if not problems(config, size)]


def advice(config: RunConfig, world_size: int) -> str:
    """Return advice: a batch or a layout for this world size, or a world size for this layout."""
    layouts = [*nearest_batches(config, world_size), *nearest(config, world_size, count=3)]
    most = config.training.global_batch * ranks_of_a_replica(config.parallel)  # a sequence a replica
    sizes = fitting_sizes(config, range(1, min(2 * world_size, most) + 1))
    said = []
    if layouts:
        said.append(
            f"On {_processes(world_size)}: " + "; or ".join(layout.overrides(config) for layout in layouts) + "."
        )
    if sizes:
        around = sorted(sorted(sizes, key=lambda size: abs(size - world_size))[:4])
        said.append(f"As it is, on {_listed(around)} processes (--nproc).")
    if not said:
        said.append("Nothing near it does: try another number of processes (--nproc) or another training.global_batch.")
    return "What works: " + " ".join(said)


def _world_problems(parallel: ParallelConfig, world_size: int) -> list[str]:
    wrong = []
    dense = ranks_of_a_replica(parallel)
    if world_size % dense:
        context = f" × parallel.context={parallel.context}" if parallel.context > 1 else ""
        wrong.append(
            f"{_processes(world_size)} cannot be divided by parallel.tensor={parallel.tensor}"
            f" × parallel.pipeline={parallel.pipeline}{context} = {dense}."
        )
    experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
    if experts != parallel.pipeline and world_size % experts:
        wrong.append(
            f"{_processes(world_size)} cannot be divided by parallel.expert={parallel.expert} ×"
            f" parallel.expert_tensor={parallel.expert_tensor} × parallel.pipeline={parallel.pipeline} = {experts}."
        )
    return wrong


def _layout_problems(config: RunConfig, parallel: ParallelConfig, world_size: int) -> list[str]:
    return [*_world_problems(parallel, world_size), *_model_problems(config, parallel)]


def _model_problems(config: RunConfig, parallel: ParallelConfig) -> list[str]:
    model = config.model
    divisions = [
        layers.Division("model.vocab_size", model.vocab_size, "tensor"),
        *(division for kind in layers.kinds_in(model.pattern) for division in kind.divisions(model)),
        layers.Division("data.sequence_length", config.data.sequence_length, "tensor"),
    ]
    wrong = [
        f"{what}={size} cannot be divided by parallel.{axis}={getattr(parallel, axis)}; {_small_divisors(size)} could."
        for what, size, axis in divisions
        if size % getattr(parallel, axis)
    ]
    wrong += _cut_problems(config, parallel)
    if model.layers // model.layers_together < parallel.pipeline:
        pairs = " in pairs (model.arrangement=parallel)" if model.layers_together > 1 else ""
        wrong.append(f"{model.layers} layers{pairs} cannot fill parallel.pipeline={parallel.pipeline} stages.")
    if not layers.routes(model.pattern) and (parallel.expert, parallel.expert_tensor) != (1, 1):
        wrong.append(
            f"parallel.expert={parallel.expert} and parallel.expert_tensor={parallel.expert_tensor} need experts,"
            f" and the pattern {model.pattern!r} has no layer with experts."
        )
    return wrong


def _cut_problems(config: RunConfig, parallel: ParallelConfig) -> list[str]:
    length, context = config.data.sequence_length, parallel.context
    if context == 1 or length % parallel.tensor:
        return []
    if not length % (parallel.tensor * context):
        return []
    cut = f"parallel.tensor={parallel.tensor} × parallel.context={context}"
    if length < parallel.tensor * context:
        return [f"data.sequence_length={length} leaves ranks without tokens: {cut} needs at least one for each rank."]
    return [f"data.sequence_length={length} cannot be divided by {cut}."]


def _batch_problems(config: RunConfig, world_size: int) -> list[str]:
    keys = {stage.batch: "training.batch_ramp: batch" for stage in config.training.batch_ramp}
    keys[config.training.global_batch] = "training.global_batch"
    return [problem for batch, key in keys.items() for problem in _problems_of(batch, key, config, world_size)]


def _problems_of(batch: int, key: str, config: RunConfig, world_size: int) -> list[str]:
    parallel, micro = config.parallel, config.training.micro_batch
    data = data_parallel_size(parallel, world_size)
    if batch % data:
        near = sorted({data * max(1, batch // data), data * -(-batch // data)})
        return [
            f"{key}={batch} sequences cannot be divided by {data} data-parallel ranks"
            f" ({_processes(world_size)} / parallel.tensor={parallel.tensor} / parallel.pipeline={parallel.pipeline}"
            f"{f' / parallel.context={parallel.context}' if parallel.context > 1 else ''});"
            f" {_listed(near)} could."
        ]
    if batch // data % micro:
        fitting = _divisors(batch // data)
        return [
            f"training.micro_batch={micro} does not divide the {batch // data} sequences of each data-parallel rank"
            f" ({key}={batch} / {data}); {_listed(fitting)} would."
        ]
    if loses_bits(config, batch // data // micro):
        return [
            f"optimizer.gradients=bf16 loses too many bits if a rank adds up more than {MOST_IN_BF16} micro-batches,"
            f" not {batch // data // micro}. Raise training.micro_batch, or set optimizer.gradients=fp32."
        ]
    return []


def _small_divisors(number: int) -> str:
    return _listed([size for size in range(1, min(number, LARGEST_SHOWN) + 1) if number % size == 0])


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
