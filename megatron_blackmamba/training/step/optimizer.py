"""A model made trainable: megatron-core's gradient reduction around it, and its optimizer over it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from unittest import mock

import torch

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.config.run import OptimizerConfig as Settings
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.optimizers import OptimizerKind
from megatron_blackmamba.optimizers.base import NO_DECAY
from megatron_blackmamba.runtime.adam import Adam
from megatron_blackmamba.runtime.reduction import reduction
from megatron_blackmamba.runtime.world import World
from megatron_blackmamba.training import fixes
from megatron_blackmamba.training.accumulation import Accumulation
from megatron_blackmamba.training.fused_update import fuse_update
from megatron_blackmamba.training.gathering import FirstForward
from megatron_blackmamba.training.redundant import leave_out_redundant_work

from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


@dataclass
class Trainable:
    """The model, its gradient-reducing wrapper, and the optimizer."""

    model: LanguageModel
    reduced: Accumulation
    optimizer: MegatronOptimizer

    def settle(self) -> None:
        """Gather the updated weights now; with overlap they would otherwise be gathered in the next forward pass."""
        if self.reduced.ddp_config.overlap_param_gather:
            self.reduced.start_param_sync(force_sync=True)


def make_trainable(
    config: RunConfig, model: LanguageModel, world: World, skip: frozenset[str] = frozenset()
) -> Trainable:
    """Wrap the model and build its optimizer; afterwards the model's config knows how to reduce, scale and overlap.

    skip: names of fixes to leave out, for tests.
    """
    how = reduction(config, world.data_context_size)
    reduced = Accumulation(model.config, how, model)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of the class, in the shape of another optimizer's scale
    settings = config.optimizer
    kind = optimizers.kind_of(settings.kind)
    if kind.extends:
        resolve_name(kind.extends)()
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
    fixes.fix_optimizer(optimizer, kind, skip)
    leave_out_redundant_work(optimizer, reduced)
    fuse_update(optimizer, settings.gradients)
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
    """Have megatron-core wrap the kind's own optimizer, if it has one, where it would build its SGD.

    Moments or gradients in bf16 are always for this project's Adam. Others round such moments to nearest, and
    megatron-core copies such gradients to fp32 for them.
    """

    def build(groups: list[dict], lr: float, weight_decay: float, momentum: float) -> torch.optim.Optimizer:
        own = kind.build(groups, settings)
        return built_in(groups, lr=lr, weight_decay=weight_decay, momentum=momentum) if own is None else own

    built_in = megatron_optimizer.SGD
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(megatron_optimizer, "SGD", build))
        if "bf16" in (settings.moments, settings.gradients):
            ours = partial(Adam, moments=torch.bfloat16 if settings.moments == "bf16" else None)
            patches.enter_context(mock.patch.object(megatron_optimizer, "Adam", ours))
            patches.enter_context(mock.patch.object(distrib_optimizer, "Adam", Adam))  # which it checks
        yield
