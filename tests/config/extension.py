"""A module for BLACKMAMBA_IMPORT: kinds of each sort with config keys of their own."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from megatron_blackmamba import layers, norms, optimizers, routers
from megatron_blackmamba.settings import Section
from megatron_blackmamba.settings.rules import BY_NAME
from tests.layers.running_mean.kind import RunningMean
from tests.model.shifted_norm import ShiftedNorm
from tests.optimizers.lion import Lion
from tests.routers.first_experts import FirstExperts
from tests.routers.unbalanced import Unbalanced


class MeanSettings(Section):
    window: int = Field(8, gt=0)
    note: Annotated[str, BY_NAME] = "none"


class Mean(RunningMean):
    settings = MeanSettings

    def problems(self, model):
        return ["a window of 13"] if self.settings_in(model).window == 13 else []


class LionSettings(Section):
    sharpness: float = Field(1.0, gt=0)


class SharpLion(Lion):
    name = "sharp_lion"
    settings = LionSettings

    def build(self, groups, settings):
        sharpness = self.settings_in(settings).sharpness
        return super().build(groups, settings.model_copy(update={"beta1": settings.beta1**sharpness}))


class ScaledSettings(Section):
    scale: float = Field(1.0, gt=0)


class Scaled(Unbalanced):
    name = "scaled"
    settings = ScaledSettings

    def use(self, model):
        return replace(super().use(model), scale=self.settings_in(model).scale)


layers.register(Mean)
norms.register(ShiftedNorm)
optimizers.register(SharpLion)
routers.register(FirstExperts)
routers.register(Scaled)
