"""A whole optimizer kind in one file: Lion, which moves every weight by the sign of an average of gradients."""

from megatron_blackmamba.optimizers import Cannot, OptimizerKind


class Lion(OptimizerKind):
    name = "lion"
    keys = ("beta1", "beta2")
    state = ("average",)
    sharding = Cannot("megatron-core's distributed optimizer can only save the two moments of Adam")

    def megatron(self, settings):
        return {"optimizer": "sgd"}

    def build(self, groups, settings):
        betas = (settings.beta1, settings.beta2)
        return lion()(groups, {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "betas": betas})


def lion():
    import torch

    class LionOptimizer(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                for weight in group["params"]:
                    if not self.state[weight]:
                        self.state[weight]["average"] = torch.zeros_like(weight)
                    average = self.state[weight]["average"]
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(average.lerp(weight.grad, 1 - beta1).sign_(), alpha=group["lr"])
                    average.lerp_(weight.grad, 1 - beta2)

    return LionOptimizer
