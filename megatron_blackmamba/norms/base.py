"""The questions that a kind of the last norm answers.

Shapes: D model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_blackmamba.registry import Cannot, Kind

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig

OWN_MODULE = "megatron_blackmamba.model.norms:LastNorm"
PREFIX = "decoder.final_layernorm."
"""What the canonical names of its parameters begin with."""


class NormKind(Kind, ABC):
    """A norm between the last layer and the head. Import torch inside methods: the config reads these files too."""

    name: ClassVar[str]
    """The value of model.final_norm."""
    module: ClassVar[str] = OWN_MODULE
    """The torch module of training, as "package.module:class": one that calls `apply`, or a faster one."""
    parameters: ClassVar[tuple[str, ...]]
    """Names of its parameters, of the shape `[D]`, in the order in which `apply` takes them."""
    released: ClassVar[bool] = False
    """Whether the released BlackMamba format has it."""
    ones: ClassVar[tuple[str, ...]] = ("weight",)
    """Parameters that are one at first; the others are zero."""

    @abstractmethod
    def apply(self, x: Tensor, parameters_D: tuple[Tensor, ...], eps: float) -> Tensor:
        """Return the norm of the last axis of x, in training and decoding. A kind with `settings` takes them too."""

    def own(self, model: ModelConfig) -> tuple[Any, ...]:
        """Return the last argument of `apply`, the values of `settings`, if the kind has any."""
        return (self.settings_in(model),) if self.settings else ()

    def exported(self, model: ModelConfig) -> bool | Cannot:
        """Return whether exports have a class for it: `modeling`, of (width, epsilon) and the values of `settings`."""
        return bool(self.modeling) or Cannot(f"the modeling files have no class for model.final_norm={self.name}")
