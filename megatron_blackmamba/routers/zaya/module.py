"""ZAYA1's router as a torch module.

Shapes: S sequence, B batch, D model, T = S * B tokens of this rank, R numbers that pass from layer to layer. E experts,
and with model.router.skip one more choice behind them.
"""

from dataclasses import replace

from torch import Tensor

from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.router import Measured
from megatron_blackmamba.model.state_router import BiasRouter
from megatron_blackmamba.ops.fp32_linear import fp32_linear
from megatron_blackmamba.routers import Routed
from megatron_blackmamba.routers.zaya.arithmetic import logits_and_state
from megatron_blackmamba.routers.zaya.kind import BETA1, BETA2, EPS

from megatron.core.process_groups_config import ProcessGroupCollection


class ZayaRouter(BiasRouter):
    """An MLP behind a state that passes from layer to layer; an Adam of its own moves the bias."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection, is_mtp_layer)
        self.register_buffer("skipped", self.zero_counts(2), persistent=False)  # choices that skip, and all

    def forward(self, hidden_SBD: Tensor, inputs: LayerInputs | None = None) -> Routed:
        """Return the experts of each token; a choice that skips is none of them."""
        routed = super().forward(hidden_SBD, inputs)
        if self.choices == self.num_experts:
            return routed
        weights_TE, chosen_TE = (each[:, :-1] for each in replace(routed, experts=self.choices).as_map())
        return replace(routed, chosen=chosen_TE, weights=weights_TE)

    def computed(self, hidden_SBD: Tensor, inputs: LayerInputs | None) -> tuple[Tensor, Tensor]:
        """Compute as the kind does, but make no fp32 copy of the hidden states."""
        down_SBR = fp32_linear(hidden_SBD, self.down, self.down_bias, self.config.full_precision)
        carried_SBR = self.carried(hidden_SBD, inputs)
        weights = self.widened(but=("down", "down_bias"))
        return logits_and_state(down_SBR, carried_SBR, weights, self.config.layernorm_epsilon)

    def gather(self, logits_TE: Tensor, chosen: Tensor) -> None:
        super().gather(logits_TE, chosen)
        if self.choices > self.num_experts:
            self.skipped[0] += (chosen == self.num_experts).sum()
            self.skipped[1] += chosen.numel()

    def measured(self) -> Measured:
        if self.choices == self.num_experts:
            return super().measured()
        skipped, of = self.skipped.tolist()
        self.skipped.zero_()
        return super().measured() | {"skipped": (skipped, of)}

    def move(self) -> None:
        """Take a step of Adam against each expert's share, less an equal one."""
        tokens = self.gathered.sum().clamp(min=1)
        gradient_E = self.gathered.double() / tokens - 1 / self.choices
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
