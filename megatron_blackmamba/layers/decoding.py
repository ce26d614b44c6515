"""How a layer decodes: what a decoder asks of it, and what it may ask of the decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.ops.decoding import Step
    from megatron_blackmamba.settings import ModelConfig


@dataclass
class Inputs:
    """The inputs of a layer that decodes, beside hidden states."""

    ids: Tensor
    """`[B]` for one token of each sequence, or `[B, L]`."""
    keep_BL1: Tensor | None = None
    """0 at padding, which must leave no trace."""
    reset_BL: Tensor | None = None
    """True where the memory restarts first."""
    carried_TR: Tensor | None = None
    """What the last router left for the next, of each token; None before the first."""


class Runner(Protocol):
    """The parts of a decoder that its layers use."""

    config: ModelConfig

    def times(self, x_BI: Tensor, weight_OI: Tensor) -> Tensor:
        """Multiply a few rows by a weight."""
        ...

    def activated(self, x: Tensor) -> Tensor:
        """Return what the second weight of an MLP reads, of the product with the first."""
        ...


class Decoding(ABC):
    """A layer as a recurrence: its weights as decoding reads them, its memory, and one or many tokens through it.

    Norm and residual belong to the decoder, except in `compiled`, whose step contains both. A memory is a list: a layer
    changes its tensors in place, or puts longer ones in their place if `grows`.
    """

    grows: ClassVar[bool] = False
    """Whether the memory grows with every token."""
    routes: ClassVar[bool] = False
    """Whether tokens choose experts, which `choice` then returns."""

    @classmethod
    def of(cls, model: ModelConfig) -> Decoding:
        """Return the decoding of a model's layers."""
        return cls()

    @abstractmethod
    def pack(self, get: Callable[..., Tensor], model: ModelConfig, dtype: torch.dtype, device: Any) -> Any:
        """Return the weights: an object whose attributes are tensors, dictionaries of them, or None.

        `get(name, dtype)` loads one tensor of the mixer, by default in fp32.
        """

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        """Return the memory of `batch` sequences before their first token, if any; the first axis is the batch."""
        return []

    @abstractmethod
    def step(self, run: Runner, layer: Any, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        """Return the output for one token of each sequence; update `memory` in place."""

    @abstractmethod
    def read(self, run: Runner, layer: Any, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        """Return the outputs for many tokens at once; update `memory` in place."""

    def choice(self, layer: Any, x_TD: Tensor, inputs: Inputs, model: ModelConfig) -> Tensor:
        """Return the experts of each token, `[T, K]`; x_TD is the layer's input in fp32."""
        raise NotImplementedError

    def restart(self, memory: list[Tensor], going_on_B: Tensor) -> None:
        """Forget the sequences where `going_on_B` is false: a document has ended."""
        for tensor in memory:
            tensor.mul_(going_on_B.view(-1, *[1] * (tensor.dim() - 1)))

    def compiled(self, layer: Any, norm_D: Tensor, model: ModelConfig) -> Step | None:
        """Return the whole block's step in C++ or Triton, if there is one for the weights' device."""
        return None

    def bytes_a_token(self, layer: Any, model: ModelConfig) -> int:
        """Return the bytes of weights that one step reads at batch 1."""
        return sum(tensor.nbytes for tensor in tensors_of(layer))


def tensors_of(layer: Any) -> Iterator[Tensor]:
    """Yield the tensors of a layer, as `pack` returned it."""
    for value in vars(layer).values():
        if value is not None:
            yield from value.values() if isinstance(value, Mapping) else (value,)
