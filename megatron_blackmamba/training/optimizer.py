"""A model made trainable: megatron-core's gradient reduction around it, and its optimizer over it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from unittest import mock

import torch

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.config.run import OptimizerConfig as Settings
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.model.sharding import NO_DECAY
from megatron_blackmamba.optimizers import OptimizerKind
from megatron_blackmamba.runtime.reduction import reduction
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training.gathering import FirstForward

from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import (
    DistributedDataParallel,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class NonFiniteGradient(ArithmeticError):
    """The gradient norm is not a number: no weight was touched."""

    def __init__(self, norm: float):
        super().__init__(f"the gradient norm is {norm}")
        self.norm = norm


@dataclass
class Trainable:
    """What a step needs: the model, its gradient-reducing wrapper, and the optimizer."""

    model: LanguageModel
    reduced: DistributedDataParallel
    optimizer: MegatronOptimizer

    def settle(self) -> None:
        """Make the weights those of the last update: with overlap they are gathered lazily, at the next forward."""
        if self.reduced.ddp_config.overlap_param_gather:
            self.reduced.start_param_sync(force_sync=True)


def make_trainable(config: RunConfig, model: LanguageModel, world: World) -> Trainable:
    """Wrap the model and build its optimizer; afterwards the model's config knows how to reduce, scale and overlap."""
    how = reduction(config, world.data_size)
    reduced = DistributedDataParallel(model.config, how, model)
    _count_padding(reduced)
    settings = config.optimizer
    kind = optimizers.kind_of(settings.kind)
    with _built_by(kind, settings):
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=settings.learning_rate,
                min_lr=settings.min_learning_rate,
                weight_decay=settings.weight_decay,
                clip_grad=settings.clip,
                bf16=model.config.bf16,
                params_dtype=model.config.params_dtype,
                use_distributed_optimizer=how.use_distributed_optimizer,
                overlap_param_gather=how.overlap_param_gather,
                **kind.megatron(settings),
            ),
            [reduced],
            config_overrides={ParamKey(attr=NO_DECAY): ParamGroupOverride(wd_mult=0.0)},
            use_gloo_process_groups=False,
        )
    _know_first_state(optimizer, kind)
    _refuse_non_finite(optimizer)
    _number_as_stored(optimizer)
    _forget_rates(optimizer)
    _keep_settings(optimizer)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    if how.overlap_grad_reduce:
        model.config.no_sync_func = reduced.no_sync
        if how.overlap_param_gather:
            model.config.param_sync_func = reduced.start_param_sync
            FirstForward(reduced, model)
    return Trainable(model, reduced, optimizer)


@contextmanager
def _built_by(kind: OptimizerKind, settings: Settings) -> Iterator[None]:
    """Have megatron-core wrap the kind's own optimizer, if it has one, where it would build its SGD."""

    def build(groups: list[dict], lr: float, weight_decay: float, momentum: float) -> torch.optim.Optimizer:
        own = kind.build(groups, settings)
        return built_in(groups, lr=lr, weight_decay=weight_decay, momentum=momentum) if own is None else own

    built_in = megatron_optimizer.SGD
    with mock.patch.object(megatron_optimizer, "SGD", build):
        yield


def _count_padding(reduced: DistributedDataParallel) -> None:
    """Have checkpoints find the optimizer's state of each parameter where it lies in its buffer.

    megatron-core gathers the buckets of a buffer without the padding at their ends, but cuts the parameters out at
    places that count it: from the second bucket on, a checkpoint would hold shifted weights, and zeros for the last.
    """
    for buffer in (*reduced.buffers, *reduced.expert_parallel_buffers):
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def _know_first_state(optimizer: MegatronOptimizer, kind: OptimizerKind) -> None:
    """Make the state of kinds for which megatron-core cannot: for loading, and for saving before the first update."""

    def fill(inner: torch.optim.Optimizer, _: object = None) -> None:
        for group in inner.param_groups:
            for weight in group["params"]:
                if not inner.state[weight]:
                    inner.state[weight].update(kind.first_state(weight))

    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.init_state_fn is None:
            part.init_state_fn = fill


def _refuse_non_finite(optimizer: MegatronOptimizer) -> None:
    """Have `optimizer.step` raise before it touches a weight, where megatron-core would clip by NaN and go on."""
    norm_of = optimizer.get_grad_norm

    def finite_norm() -> float:
        norm = float(norm_of())
        if not math.isfinite(norm):
            raise NonFiniteGradient(norm)
        return norm

    optimizer.get_grad_norm = finite_norm


def _forget_rates(optimizer: MegatronOptimizer) -> None:
    """Have the schedule alone know the learning rates.

    megatron-core notes them in every group, from 0.17 on finds a checkpoint's groups by them, and so would not load one
    whose run had another rate.
    """
    for group in optimizer.param_groups:
        group.pop("max_lr", None)
        group.pop("min_lr", None)


def _keep_settings(optimizer: MegatronOptimizer) -> None:
    """Have a loaded checkpoint bring moments and the step count, but not the betas and eps it was made with.

    The config decides those. Resuming compares it with the checkpoint's and refuses or announces each difference.
    """
    load = optimizer.load_state_dict

    def load_state(state: dict) -> None:
        configured = [
            {k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups
        ]
        load(state)
        for group, settings in zip(optimizer.param_groups, configured, strict=True):
            group.update(settings)

    optimizer.load_state_dict = load_state


def _number_as_stored(optimizer: MegatronOptimizer) -> None:
    """Have the distributed optimizer find the state of each parameter where it is.

    It stores the fp32 parameters of a group before the bf16 ones, but numbers them as they lie in the gradient buffers.
    Where a group has both, as A_log and the norms of a bf16 model, a checkpoint would hold one's state under another's
    name.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            for group, kinds in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
                for place, parameter in enumerate(chain(*kinds)):
                    part.model_param_group_index_map[parameter] = (group, place)
