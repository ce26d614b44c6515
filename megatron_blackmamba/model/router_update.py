"""The update of what routers keep, such as expert biases, in a training loop of the user's own."""

import warnings
from typing import Any

import torch
from torch import nn

from megatron_blackmamba.model.language_model import LanguageModel
from megatron_blackmamba.model.router import KindRouter, MegatronRouter

from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter

STEPS_WITHOUT_UPDATE = 2


@torch.no_grad()
def update_routers(model: nn.Module) -> None:
    """Change what routers keep, by the tokens since the last call, over all replicas; biases balance the experts."""
    for module in model.modules():
        if isinstance(module, LanguageModel) and (reminder := vars(module).get("update_reminder")) is not None:
            reminder.steps = 0
        if isinstance(module, KindRouter | MegatronRouter):
            module.end_batch()
            module.begin_batch()
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            tokens_E, rate = module.local_tokens_per_expert, module.config.moe_router_bias_update_rate
            module.expert_bias.copy_(get_updated_expert_bias(tokens_E, module.expert_bias, rate))
            tokens_E.zero_()


def remind_of_update(model: LanguageModel) -> None:
    """Have the model warn when its weights are updated again and again and what routers keep never."""
    found = (module.kind.state for module in model.modules() if isinstance(module, KindRouter | MegatronRouter))
    if kept := next(found, ()):
        model.update_reminder = _Reminder(kept)
        model.register_forward_pre_hook(model.update_reminder)


class _Reminder:
    """Counts the updates of the weights that it sees between forward passes in training."""

    def __init__(self, kept: tuple[str, ...]) -> None:
        self.kept = kept
        self.version: int | None = None
        self.steps = 0

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        version = next(model.parameters())._version
        self.steps += self.version not in (None, version)
        self.version = version
        if self.steps == STEPS_WITHOUT_UPDATE:
            fault = (
                "the expert biases are not updated, so nothing balances the experts"
                if "expert_bias" in self.kept
                else f"what the routers keep ({', '.join(self.kept)}) is not updated"
            )
            warnings.warn(f"{fault}: call update_routers(model) after each optimizer.step()", stacklevel=3)
