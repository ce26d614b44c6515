"""A router kind in one file, as somebody else would add it: each token takes its best experts, balanced or not."""

from megatron_blackmamba.routers import RouterKind, Use


class Unbalanced(RouterKind):
    name = "unbalanced"
    keys = ()
    depends_on = "the token alone"

    def choose(self, logits_TE, at):
        return self.use(at.model).choice(logits_TE, at.model.top_k)

    def use(self, model):
        return Use("sigmoid", normalized=model.top_k > 1)

    def layouts(self, model):
        return True
