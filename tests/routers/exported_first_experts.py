"""The router of first_experts.py in an export, which contains a copy of this file."""

from megatron_blackmamba.hf.layers_blackmamba import Router


class FirstExperts(Router):
    def __init__(self, config, experts):
        super().__init__(config, experts)
        self.count = config.extensions["first_experts"]["count"]

    def selecting(self, logits_TE, ids=None):
        logits_TE = super().selecting(logits_TE, ids).clone()
        logits_TE[:, self.count :] = float("-inf")
        return logits_TE
