"""Leaves out one change after another and tells what a few steps of the tiny model then run into.

A process that has loaded torch and megatron-core, unpatched, forks one rank or two for each change.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megatron_blackmamba.config import load
from megatron_blackmamba.engine import changes
from megatron_blackmamba.runtime.process import freeze_gc
from tests.runtime.ranks import fork_ranks

MIXED = ((4, torch.bfloat16), (12, torch.float32), (9, torch.bfloat16))
"""Sizes and types of gradients, as `optimizer.gradients=bf16` has them."""
SMALL = ["data.sequence_length=16", "training.micro_batch=2", "training.global_batch=8"]


def train(overrides: list[str]) -> dict:
    """Two steps, a save of the optimizer's state, and a fresh optimizer that takes it up."""
    from megatron_blackmamba import model
    from megatron_blackmamba.runtime import layout, world

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = load("tiny", [*SMALL, *overrides])
    us = world.start(config.parallel)
    torch.set_num_threads(1)
    net = model.build(config, us)
    megatron_config = net.config
    ddp = DistributedDataParallel(
        megatron_config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), net
    )
    make_optimizer = partial(
        get_megatron_optimizer,
        OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, clip_grad=1.0),
        [ddp],
        use_gloo_process_groups=False,
    )
    optimizer = make_optimizer()
    megatron_config.finalize_model_grads_func = finalize_model_grads
    tokens = torch.arange(2 * 17).reshape(2, 17) % config.model.vocab_size

    def forward(data: object, stage: torch.nn.Module):
        return stage(tokens[:, :-1], labels_BS=tokens[:, 1:]), lambda losses: (losses.mean(), {"loss": losses.mean()})

    losses = []
    for _ in range(2):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        shown = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=[ddp],
            num_microbatches=layout.micro_batches(config, us.size),
            seq_length=16,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        losses += [float(part["loss"]) for part in shown[:1]]
    _resume(net, optimizer, make_optimizer())
    world.shutdown()
    return {"losses": losses}


def _resume(net: torch.nn.Module, trained: object, fresh: object) -> None:
    how = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    fresh.sharded_state_dict(net.sharded_state_dict(metadata=how), is_loading=True, metadata=how)
    fresh.load_state_dict(trained.state_dict())


def route_as_megatron_does() -> dict:
    """The gate of megatron-core's own router."""
    from megatron.core.transformer.moe import moe_utils

    weight, x = torch.ones(4, 8), torch.ones(3, 8)
    out = moe_utils.RouterGatingLinearFunction.apply(x, weight, None, torch.float32)
    return {"shape": list(out.shape)}


def gate_as_megatron_does() -> dict:
    """One of the small functions that megatron-core wants compiled."""
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    return {"gated": float(swiglu(torch.ones(1, 2)))}


def clip() -> dict:
    """The gradient norm, with the numbers that the host reads counted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron.core.optimizer import clip_grads

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    us = world_of_one()
    weights = [torch.nn.Parameter(torch.full((n,), 3.0)) for n in (4, 12)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with Reads() as reads:
        norm = clip_grads.get_grad_norm_fp32([weight.grad for weight in weights], grad_stats_parallel_group=us)
    if reads.count > 1:
        raise ArithmeticError(f"{reads.count} numbers read")
    clip_grads.clip_grad_by_total_norm_fp32(weights, 2.0, norm)
    return {"norm": norm, "clipped": [float(weight.grad[0]) for weight in weights]}


def norm_of_two_types() -> dict:
    """The norm of gradients in bf16 and fp32, with a kernel that reads as Transformer Engine's does."""
    from megatron.core.optimizer import clip_grads

    def norm(_: int, __: object, columns: list, *___: object) -> tuple:
        same = [x.view(columns[0][0].dtype)[: x.numel()] for x in columns[0]]
        return torch.cat(same).float().norm().view(1), None

    us = world_of_one()
    clip_grads.l2_norm_impl = norm
    gradients = [torch.full((n,), 0.1, dtype=dtype) for n, dtype in MIXED]
    exact = float(torch.cat([x.double() for x in gradients]).norm())
    found = float(clip_grads.get_grad_norm_fp32(gradients, grad_stats_parallel_group=us))
    if abs(found - exact) > 1e-6 * exact:
        raise ArithmeticError(f"a gradient norm of {found} for {exact}")
    return {"norm": found}


def world_of_one() -> object:
    from megatron_blackmamba.runtime import world

    return world.start(load("tiny", SMALL).parallel).groups.mp


def train_in_float64() -> dict:
    """Two steps of a run in float64, and the optimizer's state as a checkpoint would hold it."""
    from megatron_blackmamba import model
    from megatron_blackmamba.checkpoint import sharded
    from megatron_blackmamba.runtime import world
    from megatron_blackmamba.training.step.optimizer import make_trainable

    config = load("tiny", [*SMALL, "training.precision=fp64"])
    us = world.start(config.parallel)
    net = model.build(config, us)
    trainable = make_trainable(config, net, us)
    losses = trainable.reduced(torch.zeros(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64))
    losses.mean().backward()
    exact = sum(float(p.main_grad.square().sum()) for p in net.parameters()) ** 0.5
    _, norm, _ = trainable.optimizer.step()
    saved, _ = sharded.state_to_save(net, trainable.optimizer)
    dtypes = {str(x.dtype) for x in _tensors(saved)} - {"torch.int64"}
    if losses.dtype is not torch.float64 or dtypes != {"torch.float64"} or abs(norm - exact) > 1e-12 * exact:
        raise ArithmeticError(f"rounded to fp32: losses {losses.dtype}, saved {dtypes}, norm {norm} for {exact}")
    return {"norm": norm}


def _tensors(state: object) -> list:
    """Return the sharded tensors of a nested state."""
    if isinstance(state, (dict, list)):
        inside = state.values() if isinstance(state, dict) else state
        return [tensor for value in inside for tensor in _tensors(value)]
    return [state] if hasattr(state, "global_shape") and hasattr(state, "dtype") else []


def save() -> dict:
    """A checkpoint of the tiny model."""
    from megatron_blackmamba import model
    from megatron_blackmamba.runtime import world

    from megatron.core import dist_checkpointing

    config = load("tiny", SMALL)
    net = model.build(config, world.start(config.parallel))
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(net.sharded_state_dict(), folder)
        return {"files": len(list(Path(folder).iterdir()))}


def attempt(skip: frozenset[str], scenario: tuple[int, Callable[[], dict]]) -> list[dict]:
    """One scenario with some changes left out, in ranks of its own."""
    count, run = scenario

    def body() -> dict:
        changes.install(skip)
        return run()

    return fork_ranks(count, body)


def plan_a_save() -> dict:
    """Plan as torch does on a rank that cannot make the folder."""
    from megatron_blackmamba.runtime import world

    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    world.start(load("tiny").parallel)
    with tempfile.NamedTemporaryFile() as file:
        FileSystemWriterAsync(f"{file.name}/step").prepare_local_plan(None)
    return {"losses": []}


def receive_shard() -> dict:
    """Make room for a shard that another replica has read, as an exchange does."""
    from megatron_blackmamba.runtime import world

    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    world.start(load("tiny").parallel)
    shard = ShardedTensor.from_rank_offsets("weight", torch.ones(3)).without_data()
    shard.init_data("cuda")
    return {"shape": list(shard.data.shape), "losses": []}


def read_strides() -> dict:
    """Read metadata as torch writes it from 2.15 on."""
    from megatron_blackmamba.runtime import world

    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    world.start(load("tiny").parallel)
    properties = TensorProperties.create_from_tensor(torch.zeros(3, 2))
    properties.strides = (2, 1)
    stored = Metadata({"weight": TensorStorageMetadata(properties, torch.Size([3, 2]), [])})
    found = TorchDistLoadShardedStrategy().load_tensors_metadata(None, stored)
    return {"shape": list(found["weight"].global_shape), "losses": []}


def look_for_the_tracer() -> dict:
    """Train two steps and ask what they have imported."""
    answer = train([])
    if "torch._dynamo" in sys.modules:
        raise ImportError("torch._dynamo was imported")
    return answer


ONE = (1, partial(train, []))
TWO_STAGES = (2, partial(train, ["parallel.pipeline=2"]))
CUT_EXPERTS = (4, partial(train, ["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2"]))
SPREAD_EXPERTS = (2, partial(train, ["parallel.expert=2"]))
SCENARIOS = {
    "jit": (1, gate_as_megatron_does),
    "tracer": (1, look_for_the_tracer),
    "current-device": ONE,
    "synchronize": (1, save),
    "streams": SPREAD_EXPERTS,
    "device-literals": ONE,
    "loaded-shards": (1, receive_shard),
    "tensor-cuda": TWO_STAGES,
    "tensor-type": ONE,
    "rng": ONE,
    "split-sizes": SPREAD_EXPERTS,
    "uneven-parts": CUT_EXPERTS,
    "router-gemm": (1, route_as_megatron_does),
    "adam": ONE,
    "clipping": (1, clip),
    "one-type": (1, norm_of_two_types),
    "float64": (1, train_in_float64),
    "checkpoint-folder": (1, plan_a_save),
    "stored-strides": (1, read_strides),
}


COMPLETE = ("jit", "tracer", "synchronize", "streams", "tensor-cuda", "router-gemm", "adam", "clipping", "float64")
COMPLETE += ("one-type", "checkpoint-folder", "stored-strides")


def refuse_to_compile() -> None:
    """Let an attempt to compile end with a message, not minutes later."""

    def compiled(function: Callable | None = None, **options: object) -> Callable:
        if function is None:
            return partial(compiled, **options)

        def refuse(*args: object, **kwargs: object) -> None:
            raise RuntimeError("torch.compile was asked to compile")

        refuse._torchdynamo_orig_callable = function
        return refuse

    torch.compile = compiled


def main() -> None:
    refuse_to_compile()
    for module in ("optimizer", "distributed", "transformer.moe.moe_layer", "pipeline_parallel", "dist_checkpointing"):
        importlib.import_module(f"megatron.core.{module}")
    freeze_gc()  # before the forks, which would each look through all of it
    needed = [change.name for change in changes.CHANGES if change.when == changes.IMPORT and change.needed()]
    complete = {name: attempt(frozenset(), SCENARIOS[name]) for name in COMPLETE}
    left_out = {name: attempt(frozenset({name}), SCENARIOS[name]) for name in needed}
    print(json.dumps({"needed": needed, "complete": complete, "without": left_out}))


if __name__ == "__main__":
    sys.exit(main())
