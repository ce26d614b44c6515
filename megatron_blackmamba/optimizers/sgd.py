"""Stochastic gradient descent with momentum: one running sum of gradients a weight. Weight decay joins the gradient."""

from megatron_blackmamba.optimizers.base import Cannot, OptimizerKind


class SGD(OptimizerKind):
    """`optimizer.kind: sgd`."""

    name = "sgd"
    keys = ("momentum",)
    state = ("momentum_buffer",)
    sharding = Cannot("megatron-core's distributed optimizer can only save the two moments of Adam")

    def megatron(self, settings):
        return {"optimizer": "sgd", "sgd_momentum": settings.momentum}
