"""Adam with decoupled weight decay: two moments a weight.

megatron-core takes Transformer Engine's or Apex's FusedAdam. Without them the change `adam` gives it `engine/adam.py`,
which the change `bf16-adam` also has it take for moments in bf16: only that one rounds stochastically.
"""

from megatron_blackmamba.optimizers.base import OptimizerKind


class AdamW(OptimizerKind):
    """`optimizer.kind: adamw`, the default."""

    name = "adamw"
    keys = ("beta1", "beta2", "eps", "moments")
    state = ("exp_avg", "exp_avg_sq")
    sharding = True
    widens = True
    fused = True

    def number_bytes(self, settings, full):
        return 2 if settings.moments == "bf16" else full

    def megatron(self, settings):
        return {
            "optimizer": "adam",
            "adam_beta1": settings.beta1,
            "adam_beta2": settings.beta2,
            "adam_eps": settings.eps,
        }
