"""The questions that an optimizer kind answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_blackmamba.registry import Cannot, Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.settings import OptimizerConfig


NO_DECAY = "no_weight_decay"
"""The attribute of weights without weight decay."""
DECLARED = "declared"
"""The attribute of a mixer's parameter that holds what its kind says of it, a Weight or a Stack."""
BY_ADAM = "is_updated_by_adam"
"""The attribute of matrices that Muon leaves to Adam."""
EMBEDDING_OR_HEAD = "is_embedding_or_output_parameter"
"""megatron-core's attribute of these matrices."""


class OptimizerKind(Kind, ABC):
    """An optimizer: what it is called, reads, keeps and saves.

    Learning rate, schedule, weight decay and clipping belong to every kind. Nothing here may import torch or
    megatron-core at its top: the config reads these files too.
    """

    name: ClassVar[str]
    """The value of optimizer.kind."""
    keys: ClassVar[tuple[str, ...]]
    """Keys of `optimizer:` that only some kinds read, such as ("beta1", "beta2"). A kind that does not read a key
    refuses another value than its default."""
    state: ClassVar[tuple[str, ...]]
    """Tensors it keeps of each weight, of the weight's shape, named as in a checkpoint."""
    sharding: ClassVar[bool | Cannot]
    """True where megatron-core's distributed optimizer can hold this state (optimizer.distributed=true)."""
    unsharded: ClassVar[bool | Cannot] = True
    """True where it can also do without that optimizer (optimizer.distributed=false)."""

    widens: ClassVar[bool] = False
    """Whether the learning rates of a width transfer (model.mup) are derived for it."""
    by_matrix: ClassVar[bool] = False
    """Whether it updates a matrix as a whole, with the distributed optimizer, in `engine/muon.py`."""
    fused: ClassVar[bool] = False
    """Whether on GPUs its update also clips the gradients and writes the weights in bf16."""

    @abstractmethod
    def megatron(self, settings: OptimizerConfig) -> dict[str, Any]:
        """Return the fields of megatron-core's OptimizerConfig that choose and set it; "sgd" for one built here."""

    def build(self, groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer | None:
        """Return the optimizer of a kind that megatron-core does not have; None: megatron-core builds it."""
        return None

    def keeps(self, weight: Tensor) -> tuple[str, ...]:
        """Return the tensors that it keeps of one weight: `state`, unless weights differ."""
        return self.state

    def orthogonalizes(self, weight: Tensor) -> bool:
        """Return whether it updates a weight by orthogonal matrices."""
        return False

    def number_bytes(self, settings: OptimizerConfig, full: int) -> int:
        """Return the bytes of one number of its state, where one in full precision takes `full` bytes."""
        return full

    def first_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state of a weight before its first update."""
        import torch

        return {name: torch.zeros_like(weight.data) for name in self.keeps(weight)}
