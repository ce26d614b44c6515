"""What a layer costs: FLOPs, memory, traffic and the operations on a GPU, for plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, ClassVar

from megatron_blackmamba.costs import READ_WITH_GRADIENTS, SMALL_KERNELS, WRITTEN_AND_READ, Sizes, Work
from megatron_blackmamba.layers.rows import Weight

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class Cost(ABC):
    """The cost of one layer of a kind. Answers are arithmetic."""

    elementwise: ClassVar[frozenset[str]] = frozenset()
    """The parts of `flops` that are no matrix products, such as a scan."""

    @abstractmethod
    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Return the forward FLOPs of one layer per token, by part."""

    @abstractmethod
    def kept(self, at: Sizes) -> int:
        """Return the bytes that the mixer keeps for the backward pass."""

    def working(self, at: Sizes) -> int:
        """Return the bytes that its backward pass needs in addition; by default, the gradients of what it keeps."""
        return self.kept(at)

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the bytes that a layer sends in a micro-batch, by field of ParallelConfig, as if nothing stayed local.

        passes: 2 for forward and backward, 3 if recomputation repeats the forward pass. A tensor-parallel layer gathers
            and scatters the stream in each, and gathers it once more for the weight gradients: 2 * passes + 1 times.
        """
        return {"tensor": (2 * passes + 1) * at.stream}

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Return the operations of the mixer in a micro-batch on a GPU, forward and backward, for the plan's time.

        This default counts the products, and elementwise kernels that move a multiple of what the layer keeps.
        """
        flops = self.flops(at.model, at.sequence)
        products = sum(count for part, count in flops.items() if part not in self.elementwise) * at.here
        kept, (forward, backward) = self.kept(at), SMALL_KERNELS
        return (
            [Work(flops=products), Work(moved=WRITTEN_AND_READ * kept), Work(launches=forward)],
            [Work(flops=2 * products), Work(moved=READ_WITH_GRADIENTS * kept), Work(launches=backward)],
        )

    def paper_flops(self, model: ModelConfig, tokens: int) -> tuple[float, float] | None:
        """Return the paper's own FLOPs of the layer per token, as printed and repaired; None: it has no formula."""
        return None


class CostOfWeights(Cost):
    """The cost of the products with a kind's matrices: too little for a kind that computes much else."""

    def __init__(self, part: str, weights: Callable[[ModelConfig], Mapping[str, Weight]]) -> None:
        self.part, self.weights = part, weights

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        return {self.part: 2 * sum(prod(weight.shape) for weight in self._matrices(model))}

    def kept(self, at: Sizes) -> int:
        """Return the bytes of the layer's input, of what split rows compute, and of what split columns read."""
        axes = [(weight.shape, weight.axis) for weight in self._matrices(at.model)]
        split = sum(shape[axis] for shape, axis in axes if axis is not None) // at.tensor
        return at.width * (at.here * at.model.hidden_size + at.whole * split)

    def _matrices(self, model: ModelConfig) -> list[Weight]:
        return [weight for weight in self.weights(model).values() if weight.columns]
