"""Memory of the fullest GPU, part by part: what the real modules and buffers hold, and what a step adds."""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.engine.parts.accumulation import reduction
from megatron_blackmamba.engine.parts.muon import owned, products_of
from megatron_blackmamba.layers import LayerKind, kind_of, layers_of
from megatron_blackmamba.model import build
from megatron_blackmamba.model.stack import extra_depth_of_stage, layers_of_stage
from megatron_blackmamba.plan.activations import Activations
from megatron_blackmamba.runtime import layout, world
from megatron_blackmamba.settings import OptimizerConfig

GIB = 2**30
RESERVED = int(2.5 * GIB)
"""Assumed: the CUDA context, NCCL's buffers, and what the allocator cannot use."""
RESERVED_CPU = GIB // 2
"""Assumed: the private memory of Python, PyTorch and gloo."""


@dataclass(frozen=True)
class State:
    """Bytes in use for the whole run."""

    weights: int
    gradients: int
    optimizer: int
    expert_weights: int = 0
    """The part of `weights` that only the ranks with the same experts share; 0 if all ranks have all experts."""
    expert_gradients: int = 0
    """The part of `gradients` of the same experts."""
    numbers: int = 0
    """Of the optimizer's state, such as Adam's two moments of each weight."""
    products: int = 0
    """FLOPs of the products of an update."""


@dataclass(frozen=True)
class Memory:
    """Peak bytes on one GPU: in the loss, or in the backward pass of a block."""

    state: State
    activations: int
    logits: int
    working: int
    """Of the block at work: the gradients of its activations, or its activations made again."""
    communication: int
    """Sequence gathered over tensor ranks, tokens sent to and from experts, streams between stages."""
    reserved: int

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part, by name."""
        state = {name: getattr(self.state, name) for name in ("weights", "gradients", "optimizer")}
        return state | {name: size for name, size in asdict(self).items() if name != "state"}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def in_gib(self) -> dict[str, float]:
        return {name: round(size / GIB, 3) for name, size in {**self.parts, "total": self.total}.items()}


def state_of(config: RunConfig, world_size: int, rank: int) -> State:
    """Return the exact bytes of a rank's weights, gradients and optimizer state, from the real model and buffers."""
    plain = config.training.model_copy(update={"recompute": "none", "micro_batch": 1})  # these change nothing here
    return _state_of(config.model_copy(update={"training": plain}).model_dump_json(by_alias=True), world_size, rank)


@lru_cache(maxsize=1024)
def _state_of(described: str, world_size: int, rank: int) -> State:
    from megatron.core.distributed import DistributedDataParallel

    config = RunConfig.model_validate_json(described)
    with world.fake(config.parallel, world_size, rank) as us, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(config, us)
        reduced = DistributedDataParallel(model.config, reduction(config, us.data_context_size), model)
        experts = reduced.expert_parallel_buffers
        buffers = reduced.buffers + experts
        gradients, expert_gradients = (sum(buffer.grad_data.nbytes for buffer in b) for b in (buffers, experts))
        expert_weights = sum(weight.nbytes for buffer in experts for weight in buffer.param_index_map)
        if config.optimizer.distributed:
            weights = sum(buffer.param_data.nbytes for buffer in buffers)
            updated = [pair for buffer in buffers for pair in _shards(buffer)]
        else:
            weights = sum(parameter.nbytes for parameter in model.parameters())
            updated = [(parameter, parameter.numel()) for parameter in model.parameters()]
        products = sum(products_of(buffer, config.optimizer, us.groups) for buffer in buffers)
    kept = [(p.dtype, size, len(optimizers.kind_of(config.optimizer.kind).keeps(p))) for p, size in updated]
    optimizer = sum(
        size * (bytes_a_weight(dtype, config.optimizer, tensors) + bytes_of_average(dtype, config))
        for dtype, size, tensors in kept
    )
    numbers = sum(size * tensors for _, size, tensors in kept)
    return State(weights, gradients, optimizer, expert_weights, expert_gradients, numbers, products)


def bytes_of_average(dtype: torch.dtype, config: RunConfig) -> int:
    """Return the bytes of the moving average of one weight (training.ema)."""
    return torch.promote_types(dtype, torch.float32).itemsize if config.training.ema else 0


def _shards(buffer: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each weight of a buffer, and how many of its elements this rank updates."""
    for weight in buffer.param_index_map:
        start, end = owned(buffer, weight)[buffer.data_parallel_group.rank()]
        yield weight, end - start


def bytes_a_weight(dtype: torch.dtype, settings: OptimizerConfig, tensors: int) -> int:
    """Return the bytes of one weight's optimizer state of some tensors, and of the fp32 copy of a 16-bit weight."""
    full = torch.promote_types(dtype, torch.float32)
    state = tensors * optimizers.kind_of(settings.kind).number_bytes(settings, full.itemsize)
    return state + full.itemsize * (dtype != full)


def fullest(config: RunConfig, world_size: int, device: str = "cuda") -> tuple[Memory, int]:
    """Return the memory of the fullest rank, and the rank; checks the first rank of each pipeline stage.

    Ranks of a stage differ only by the padding at the end of the buffers they share; the first has none of it.
    """
    stages = config.parallel.pipeline
    found = [(of_stage(config, world_size, stage, device), stage * world_size // stages) for stage in range(stages)]
    return max(found, key=lambda pair: pair[0].total)


def of_stage(config: RunConfig, world_size: int, stage: int, device: str = "cuda") -> Memory:
    """Return the memory of the first rank of a pipeline stage."""
    state = state_of(config, world_size, stage * world_size // config.parallel.pipeline)
    return _memory(config, world_size, stage, state, device)


def beside_state(config: RunConfig, world_size: int, device: str = "cuda") -> int:
    """Return the bytes that the fullest stage needs for a step in addition to its state, without building a model."""
    nothing = State(0, 0, 0)
    stages = range(config.parallel.pipeline)
    return max(_memory(config, world_size, stage, nothing, device).total for stage in stages)


def _memory(config: RunConfig, world_size: int, stage: int, state: State, device: str) -> Memory:
    stages = config.parallel.pipeline
    sizes = Activations(config, device)
    last = stage == stages - 1
    at_work = max(sizes.working(kind) for _, kind in _kinds_of_stage(config, stage))
    for kind in layers_of(extra_depth_of_stage(config.model, stage, stages)):  # while the model's own logits wait
        at_work = max(at_work, sizes.working(kind) + sizes.logits() // 2)
    sent = _communication(config, sizes)
    logits = sizes.logits() + sizes.logits_peak() if last else 0
    in_loss = logits > at_work + sent  # the logits are gone before the last block's backward pass begins
    return Memory(
        state,
        activations=in_flight(config, world_size, stage) * kept(config, stage, config.training.recompute, device),
        logits=logits if in_loss else 0,
        working=0 if in_loss else at_work,
        communication=0 if in_loss else sent,
        reserved=RESERVED if device == "cuda" else RESERVED_CPU,
    )


def in_flight(config: RunConfig, world_size: int, stage: int) -> int:
    """Return the maximum number of micro-batches that wait for their backward pass at a stage (1F1B)."""
    return min(config.parallel.pipeline - stage, layout.micro_batches(config, world_size))


def kept(config: RunConfig, stage: int, recompute: str, device: str) -> int:
    """Return the bytes of one micro-batch that a stage saves for the backward pass, without the logits."""
    stages = config.parallel.pipeline
    sizes = Activations(config, device)
    total = sum(
        sizes.block(kind, recompute, config.model.has_norm(layer)) for layer, kind in _kinds_of_stage(config, stage)
    )
    total += sizes.embedding() if stage == 0 else 0
    if extra := extra_depth_of_stage(config.model, stage, stages):
        total += sizes.extra_depth() + sum(sizes.block(kind, recompute) for kind in layers_of(extra))
    return total + (sizes.head() if stage == stages - 1 else 0)


def _kinds_of_stage(config: RunConfig, stage: int) -> list[tuple[int, LayerKind]]:
    layers = layers_of_stage(config.model, stage, config.parallel.pipeline)
    return [(i, kind_of(config.model.pattern[i])) for i in layers]


def _communication(config: RunConfig, sizes: Activations) -> int:
    parallel = config.parallel
    gathered = sizes.sizes.stream if parallel.tensor > 1 else 0
    dispatched = 2 * sizes.sizes.routed * config.model.routed_size * sizes.width if parallel.expert > 1 else 0
    streams = 2 * sizes.sent() if parallel.pipeline > 1 else 0
    return gathered + dispatched + streams
