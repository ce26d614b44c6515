"""The update of expert biases in a training loop of the user's own; in a run megatron-core does it."""

import warnings
from typing import Any

import torch
from torch import nn

from megatron_blackmamba.model.bias_routers import BiasRouter
from megatron_blackmamba.model.language_model import LanguageModel

from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter

STEPS_WITHOUT_UPDATE = 2


@torch.no_grad()
def update_expert_bias(model: nn.Module) -> None:
    """Move the bias of each expert by the tokens since the last call, over all replicas, to balance the experts."""
    for module in model.modules():
        if isinstance(module, LanguageModel) and (reminder := vars(module).get("bias_reminder")) is not None:
            reminder.steps = 0
        if isinstance(module, BiasRouter):
            module.end_batch()
        elif isinstance(module, TopKRouter) and module.expert_bias is None:
            module.reset_global_aux_loss_tracker()
        elif isinstance(module, TopKRouter) and module.expert_bias is not None:
            tokens_E, rate = module.local_tokens_per_expert, module.config.moe_router_bias_update_rate
            module.expert_bias.copy_(get_updated_expert_bias(tokens_E, module.expert_bias, rate))
            tokens_E.zero_()


def remind_of_expert_bias(model: LanguageModel) -> None:
    """Have the model warn when its weights are updated again and again and the expert biases never."""
    if any(getattr(module, "expert_bias", None) is not None for module in model.modules()):
        model.bias_reminder = _Reminder()
        model.register_forward_pre_hook(model.bias_reminder)


class _Reminder:
    """Counts the updates of the weights that it sees between forward passes in training."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.steps = 0

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        version = next(model.parameters())._version
        self.steps += self.version not in (None, version)
        self.version = version
        if self.steps == STEPS_WITHOUT_UPDATE:
            warnings.warn(
                "the expert biases are not updated, so nothing balances the experts: call update_expert_bias(model)"
                " after each optimizer.step()",
                stacklevel=3,
            )
