"""A router kind with a config key of its own: tokens go to the first experts only."""

from pydantic import Field

from megatron_blackmamba.settings import Section
from tests.routers.unbalanced import Unbalanced


class FirstExpertsSettings(Section):
    count: int = Field(2, gt=0)
    """Number of experts that tokens may go to."""


class FirstExperts(Unbalanced):
    name = "first_experts"
    settings = FirstExpertsSettings
    modeling = "tests.routers.exported_first_experts:FirstExperts"

    def problems(self, model):
        count = self.settings_in(model).count
        fits = model.top_k <= count <= model.experts
        return [] if fits else [f"first_experts.count={count} is not between model.top_k and model.experts"]

    def selecting(self, logits_TE, at):
        logits_TE = logits_TE.clone()
        logits_TE[:, self.settings_in(at.model).count :] = float("-inf")
        return logits_TE

    def choose(self, logits_TE, at):
        return self.selecting(logits_TE, at).topk(at.model.top_k).indices
