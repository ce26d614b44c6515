"""A model made trainable: megatron-core's gradient reduction around it, and its optimizer over it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba import optimizers
from megatron_blackmamba.config import RunConfig, groups
from megatron_blackmamba.engine import changes
from megatron_blackmamba.engine.parts import micro_batch_schedule
from megatron_blackmamba.engine.parts.accumulation import Accumulation, reduction
from megatron_blackmamba.engine.parts.ema import Ema
from megatron_blackmamba.engine.parts.muon import know_matrices
from megatron_blackmamba.engine.parts.optimizer import Built
from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.optimizers.base import NO_DECAY
from megatron_blackmamba.runtime.world import World

from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer_config import ParamPredicate

RATE_FACTOR, DECAY_FACTOR = "learning_rate_factor", "weight_decay_factor"
"""Entries of a parameter group that the schedule multiplies by. A checkpoint's groups are found by megatron-core's
lr_mult and wd_mult, so it could then be loaded with the same factors only."""


@dataclass
class Trainable:
    """The model, its gradient-reducing wrapper, and the optimizer."""

    model: LanguageModel
    reduced: Accumulation
    optimizer: MegatronOptimizer
    ema: Ema | None = None
    """The moving average of the weights, if training.ema asks for one."""
    largest_logits: dict[str, Tensor] = field(default_factory=dict)
    """With optimizer.qk_clip, the largest logit of each head since the last update, by attention layer."""

    def settle(self) -> None:
        """Gather the updated weights now; with overlap they would otherwise be gathered in the next forward pass."""
        if self.reduced.ddp_config.overlap_param_gather:
            self.reduced.start_param_sync(force_sync=True)


def make_trainable(
    config: RunConfig, model: LanguageModel, world: World, skip: frozenset[str] = frozenset()
) -> Trainable:
    """Wrap the model and build its optimizer; afterwards the model's config knows how to reduce, scale and overlap.

    skip: names of changes of megatron-core to leave out, for tests.
    """
    how = reduction(config, world.data_context_size)
    reduced = Accumulation(model.config, how, model)
    settings = config.optimizer
    kind = optimizers.kind_of(settings.kind)
    # The optimizer's parts of fp32 weights are views. With a gradient each would keep its weight's node of autograd
    # alive, which adds gradients on the stream of today: a CUDA graph captured on another one would fail.
    with torch.no_grad(), changes.during(changes.BUILDING, kind, settings, skip=skip):
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
            config_overrides=_overrides(config, model),
            use_gloo_process_groups=False,
        )
    built = Built(optimizer, reduced, model, kind, settings)
    changes.apply(changes.OPTIMIZER, built, skip=skip)
    largest_logits = know_matrices(built, world.groups)
    micro_batch_schedule.connect(model.config, optimizer, reduced)
    decay = config.training.ema
    return Trainable(model, reduced, optimizer, Ema(built, decay) if decay else None, largest_logits)


def _overrides(config: RunConfig, model: LanguageModel) -> dict[ParamKey, Any]:
    """Return what differs between groups of parameters: no weight decay, and the factors of both."""
    overrides: dict[ParamKey, Any] = {ParamKey(attr=NO_DECAY): ParamGroupOverride(wd_mult=0.0)}
    if not groups.chosen(config.optimizer) and config.model.mup.base_width is None:
        return overrides
    by_matrix = optimizers.kind_of(config.optimizer.kind).orthogonalizes
    of_weight = {w: groups.factors(name, config, by_matrix(w)) for name, w in model.named_parameters()}
    for factors in sorted(set(of_weight.values()) - {(1.0, 1.0)}):
        predicate = ParamPredicate(f"factors {factors}", lambda p, factors=factors: of_weight[p] == factors)
        overrides[ParamKey(predicate=predicate)] = dict(zip((RATE_FACTOR, DECAY_FACTOR), factors, strict=True))
    return overrides
