"""ZAYA1's router as a torch module.

Shapes: S sequence, B batch, D model, E experts, R numbers that pass from layer to layer.
"""

from torch import Tensor

from megatron_blackmamba.model.bias_routers import BiasRouter
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.ops.fp32_linear import fp32_linear
from megatron_blackmamba.routers.zaya.arithmetic import logits_and_state
from megatron_blackmamba.routers.zaya.kind import BETA1, BETA2, EPS


class ZayaRouter(BiasRouter):
    """An MLP behind a state that passes from layer to layer; an Adam of its own moves the bias."""

    def computed(self, hidden_SBD: Tensor, inputs: LayerInputs | None) -> tuple[Tensor, Tensor]:
        """Compute as the kind does, but make no fp32 copy of the hidden states."""
        down_SBR = fp32_linear(hidden_SBD, self.down, self.down_bias, self.config.full_precision)
        carried_SBR = self.carried(hidden_SBD, inputs)
        return logits_and_state(down_SBR, carried_SBR, self.widened(), self.config.layernorm_epsilon)

    def move(self) -> None:
        """Take a step of Adam against each expert's share, less an equal one."""
        tokens = self.gathered.sum().clamp(min=1)
        gradient_E = self.gathered.double() / tokens - 1 / self.num_experts
        self.bias_steps += 1
        for kept_E, beta, new_E in (
            (self.bias_mean, BETA1, gradient_E),
            (self.bias_square, BETA2, gradient_E.square()),
        ):
            kept_E.mul_(beta).add_((1 - beta) * new_E.to(kept_E))
        mean_E, square_E = (
            kept_E.double() / (1 - beta ** self.bias_steps.double())
            for kept_E, beta in ((self.bias_mean, BETA1), (self.bias_square, BETA2))
        )
        step_E = self.described.router.bias_update_rate * mean_E / (square_E.sqrt() + EPS)
        self.expert_bias.sub_(step_E.to(self.expert_bias))
