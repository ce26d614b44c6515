"""Named fixes of megatron-core's optimizer and checkpoint, as `runtime/patches.py` has for machines without CUDA.

Each changes one optimizer, not megatron-core's classes. `tests/training/test_fixes.py` leaves each out in turn and
shows what breaks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from megatron_blackmamba import model  # noqa: F401  (its package installs the patches before megatron-core is imported)
from megatron_blackmamba.checkpoint import optimizer_shards
from megatron_blackmamba.optimizers import OptimizerKind

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class NonFiniteGradient(ArithmeticError):
    """The gradient norm is not a number: no weight was touched."""

    def __init__(self, norm: float):
        super().__init__(f"the gradient norm is {norm}")
        self.norm = norm


@dataclass(frozen=True)
class Fix:
    """One change to what megatron-core built, with the reason for it."""

    name: str
    why: str
    apply: Callable[..., None]


FIXES: list[Fix] = []


def fix_optimizer(optimizer: MegatronOptimizer, kind: OptimizerKind, skip: frozenset[str] = frozenset()) -> None:
    """Apply the fixes of an optimizer, except those in `skip`."""
    for fix in FIXES:
        if fix.name not in skip:
            fix.apply(optimizer, kind)


def _fix(name: str, why: str) -> Callable:
    def register(apply: Callable[..., None]) -> Callable[..., None]:
        FIXES.append(Fix(name, why, apply))
        return apply

    return register


@_fix("first-state", "megatron-core makes no state before the first update of its SGD, nor to load into")
def _know_first_state(optimizer: MegatronOptimizer, kind: OptimizerKind) -> None:
    def fill(inner: torch.optim.Optimizer, _: object = None) -> None:
        for group in inner.param_groups:
            for weight in group["params"]:
                if not inner.state[weight]:
                    inner.state[weight].update(kind.first_state(weight))

    for part in _parts(optimizer):
        if part.init_state_fn is None:
            part.init_state_fn = fill


@_fix("finite-norm", "megatron-core clips by a gradient norm that is NaN, and so makes every weight NaN")
def _refuse_non_finite(optimizer: MegatronOptimizer, kind: OptimizerKind) -> None:
    """Have `optimizer.step` raise before it touches a weight."""
    norm_of = optimizer.get_grad_norm

    def finite_norm() -> float:
        norm = float(norm_of())
        if not math.isfinite(norm):
            raise NonFiniteGradient(norm)
        return norm

    optimizer.get_grad_norm = finite_norm


@_fix(
    "state-order",
    "the distributed optimizer stores fp32 weights of a group before bf16 ones but numbers them as in the buffers",
)
def _number_as_stored(optimizer: MegatronOptimizer, kind: OptimizerKind) -> None:
    """Number weights in stored order; otherwise fp32 and bf16 weights of one group are saved under wrong names."""
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            for group, weights in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
                for place, weight in enumerate(chain(*weights)):
                    part.model_param_group_index_map[weight] = (group, place)


@_fix(
    "learning-rates",
    "megatron-core notes learning rates in every group, and from 0.17 on finds a checkpoint's groups by them",
)
def _forget_rates(optimizer: MegatronOptimizer, kind: OptimizerKind) -> None:
    """Remove learning rates from the groups, which would block loading with other rates; the schedule sets them."""
    for group in optimizer.param_groups:
        group.pop("max_lr", None)
        group.pop("min_lr", None)


@_fix(
    "settings",
    "loading brings the betas and eps that a checkpoint was made with, where the config decides those",
)
def _keep_settings(optimizer: MegatronOptimizer, kind: OptimizerKind) -> None:
    """Load moments and step count alone. Resuming compares the configs and refuses or announces each difference."""
    load = optimizer.load_state_dict

    def load_state(state: dict) -> None:
        configured = [
            {k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups
        ]
        load(state)
        for group, settings in zip(optimizer.param_groups, configured, strict=True):
            group.update(settings)

    optimizer.load_state_dict = load_state


@_fix(
    "own-shards",
    "megatron-core gathers the optimizer's whole state on every data-parallel rank, in host memory, to save it",
)
def _save_own_shards(optimizer: MegatronOptimizer, kind: OptimizerKind) -> None:
    """Save and load what each rank holds. A checkpoint made either way loads the same."""
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            setattr(part, optimizer_shards.SAVE, partial(optimizer_shards.own_shards, part))
            setattr(part, optimizer_shards.LOAD, partial(optimizer_shards.load_own_shards, part))


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])
