"""megatron-core's optimizer: how it is built, and what changes in the one that it has built."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_blackmamba.engine.adam import Adam
from megatron_blackmamba.engine.checked import private, replace
from megatron_blackmamba.engine.everywhere import norm_of
from megatron_blackmamba.optimizers import OptimizerKind
from megatron_blackmamba.settings import OptimizerConfig

from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


class NonFiniteGradient(ArithmeticError):
    """The gradient norm is not a number: no weight was touched."""

    def __init__(self, norm: float):
        super().__init__(f"the gradient norm is {norm}")
        self.norm = norm


@dataclass
class Built:
    """Optimizer and wrapper as megatron-core has built them, with what the changes of them need to know."""

    optimizer: MegatronOptimizer
    reduced: DistributedDataParallel
    """The wrapper that reduces the gradients of `model`."""
    model: nn.Module
    kind: OptimizerKind
    settings: OptimizerConfig

    @property
    def parts(self) -> list[Any]:
        """The optimizers of a chain, or the only one."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    @property
    def distributed(self) -> list[DistributedOptimizer]:
        return [part for part in self.parts if isinstance(part, DistributedOptimizer)]


@contextmanager
def built_by_kind(kind: OptimizerKind, settings: OptimizerConfig) -> Iterator[None]:
    """Have megatron-core wrap the kind's own optimizer, if it has one, where it would build its SGD."""

    def build(groups: list[dict], lr: float, weight_decay: float, momentum: float) -> torch.optim.Optimizer:
        own = kind.build(groups, settings)
        return built_in(groups, lr=lr, weight_decay=weight_decay, momentum=momentum) if own is None else own

    built_in = private(megatron_optimizer, "SGD")
    with mock.patch.object(megatron_optimizer, "SGD", build):
        yield


@contextmanager
def bf16_by_our_adam(kind: OptimizerKind, settings: OptimizerConfig) -> Iterator[None]:
    """Take this project's Adam for moments or gradients in bf16."""
    with ExitStack() as replaced:
        if "bf16" in (settings.moments, settings.gradients):
            ours = partial(Adam, moments=torch.bfloat16 if settings.moments == "bf16" else None)
            replaced.enter_context(mock.patch.object(megatron_optimizer, "Adam", ours))
            replaced.enter_context(mock.patch.object(distrib_optimizer, "Adam", Adam))  # which it checks
        yield


def forget_loss_scale(built: Built) -> None:
    replace(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)


def know_first_state(built: Built) -> None:
    def fill(inner: torch.optim.Optimizer, _: object = None) -> None:
        for group in inner.param_groups:
            for weight in group["params"]:
                if not inner.state[weight]:
                    inner.state[weight].update(built.kind.first_state(weight))

    for part in built.parts:
        if part.init_state_fn is None:
            replace(part, "init_state_fn", fill)


def refuse_non_finite(built: Built) -> None:
    """Have `optimizer.step` raise before it touches a weight."""

    def finite_norm() -> float:
        norm = float(norm_over_ranks(built.parts))
        if not math.isfinite(norm):
            raise NonFiniteGradient(norm)
        return norm

    replace(built.optimizer, "get_grad_norm", finite_norm)


def norm_over_ranks(parts: list[Any]) -> Tensor:
    """Return the norm of all gradients in float64; a rank alone waits for nobody."""
    by_ranks: dict[Any, list[Tensor]] = {}
    for part in parts:
        named_anew = getattr(part, "get_grads_for_grad_norm", None)  # in megatron-core 0.19
        gradients = (named_anew or part.get_main_grads_for_grad_norm)()
        by_ranks.setdefault(part.get_grad_stats_parallel_group(), []).extend(gradients)
    squares = []
    for ranks, gradients in by_ranks.items():
        nothing = torch.zeros((), device=torch.cuda.current_device())
        square = ((norm_of(gradients) if gradients else nothing) ** 2).double()
        if ranks.size() > 1:
            dist.all_reduce(square, group=ranks)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def number_as_stored(built: Built) -> None:
    """Number weights in stored order; otherwise fp32 and bf16 weights of one group are saved under wrong names."""
    for part in built.distributed:
        for group, weights in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for place, weight in enumerate(chain(*weights)):
                part.model_param_group_index_map[weight] = (group, place)


def forget_rates(built: Built) -> None:
    """Remove learning rates from the groups, which would block loading with other rates; the schedule sets them."""
    for group in built.optimizer.param_groups:
        group.pop("max_lr", None)
        group.pop("min_lr", None)


def keep_settings(built: Built) -> None:
    """Load moments and step count alone. Resuming compares the configs and refuses or announces each difference."""
    for optimizer in [*built.parts, *([] if built.optimizer in built.parts else [built.optimizer])]:
        load = private(optimizer, "load_state_dict")
        replace(optimizer, "load_state_dict", partial(_load_but_settings, optimizer, load))


def _load_but_settings(optimizer: Any, load: Callable[[dict], None], state: dict) -> None:
    """Load a state and keep the settings of each group, which megatron-core tells apart by only some of them."""
    steps = _steps(state)
    if steps is not None:
        for group in _groups(state):
            group["step"] = steps
    configured = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]
    load(state)
    for group, settings in zip(optimizer.param_groups, configured, strict=True):
        kept = {name: group[name] for name in ("params", "step") if name in group}
        group.clear()
        group.update(settings | kept)


def know_groups(built: Built) -> None:
    """Load each weight's state by the weight's name, whatever the groups are and however they are told apart.

    The loaded state has the tensors by name already. Only the lists of weights in its groups are by position.
    """
    for part in built.parts:
        if isinstance(part, DistributedOptimizer) or getattr(part, "is_stub_optimizer", False):
            continue  # the distributed one takes lists of weights from its own groups
        replace(part, "_filter_and_reorder_param_groups", lambda groups, saved: saved)
        replace(part, "load_state_dict", partial(_load_into_own_groups, part, part.load_state_dict))


def _load_into_own_groups(optimizer: Any, load: Callable[[dict], None], state: dict) -> None:
    steps = _steps(state)
    step = {} if steps is None else {"step": steps}
    own = optimizer.optimizer.state_dict()["param_groups"]
    # A stage without weights of this optimizer has saved no state, not even an empty one.
    load({"state": {}, **state, "param_groups": [group | step for group in own]})


def _steps(state: dict) -> int | None:
    """Return the number of steps that all groups have taken; None if the optimizer does not count them.

    A group without weights on the rank that saved the groups counts none.
    """
    return max((int(group["step"]) for group in _groups(state) if "step" in group), default=None)


def _groups(state: Any) -> Iterator[dict]:
    """Yield every parameter group in a state dict, which nests those of a chain."""
    if isinstance(state, dict):
        for name, inner in state.items():
            yield from inner if name == "param_groups" else _groups(inner)
