"""A router with a learned gain of each expert, whose choice avoids the experts that earlier steps used most.

Shapes: D model, T tokens, E experts.
"""

from megatron_blackmamba.routers import RouterKind, Use, largest


class Levelled(RouterKind):
    name = "levelled"
    keys = ()
    depends_on = "the token, and the loads of earlier steps"
    balances_micro_batches = False
    module = f"{__package__}.module:LevelledRouter"
    state = ("load",)

    def inside(self, model):
        return {"gain": (model.experts,)}

    def initial(self, name, shape, random):
        import torch

        return torch.ones(shape) if name == "gain" else None

    def logits(self, hidden_D, weights, carried_R, model):
        logits_E, _ = super().logits(hidden_D, weights, carried_R, model)
        return logits_E * weights["gain"], None

    def selecting(self, logits_TE, at):
        return logits_TE - at.state["load"]

    def choose(self, logits_TE, at):
        return largest(self.selecting(logits_TE, at), at.model.top_k)

    def use(self, model):
        return Use("sigmoid")

    def layouts(self, model):
        return True
