"""The questions that a layer kind answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from megatron_blackmamba.costs import READ_WITH_GRADIENTS, SMALL_KERNELS, WRITTEN_AND_READ, Sizes, Work
from megatron_blackmamba.layers.rows import Stack, Weight
from megatron_blackmamba.registry import Cannot, Kind, KindError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.ops.decoding import Step
    from megatron_blackmamba.settings import ModelConfig


class Division(NamedTuple):
    """A size that must be divisible by a kind of parallelism."""

    what: str
    size: int
    axis: str
    """A field of ParallelConfig."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a layer that decodes, beside hidden states."""

    ids: Tensor
    """`[B]` for one token of each sequence, or `[B, L]`."""
    keep_BL1: Tensor | None = None
    """0 at padding, which must leave no trace."""
    reset_BL: Tensor | None = None
    """True where the memory restarts first."""


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

    @abstractmethod
    def pack(self, get: Callable[..., Tensor], model: ModelConfig, dtype: torch.dtype, device: Any) -> Any:
        """Return the weights as a dataclass. `get(name, dtype)` loads one tensor of the mixer, by default in fp32."""

    @abstractmethod
    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        """Return the memory of `batch` sequences before their first token; the first axis is the batch."""

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
        return sum(tensor.nbytes for tensor in vars(layer).values())


class LayerKind(Kind, ABC):
    """One kind of layer: everything that the rest of the project asks about a letter of `model.pattern`.

    Answers are arithmetic, strings and calls of `ops`. Import torch inside methods: the config reads kinds too.
    """

    letter: ClassVar[str]
    name: ClassVar[str]
    """For messages and tables, such as "dense MLP"."""
    block: ClassVar[str]
    """A function that returns the spec of a block for `model:` and `kernels:`, named as "package.module:function"."""

    keys: ClassVar[tuple[str, ...]] = ()
    """Keys and sections of `model:` that only some kinds read, such as ("attention", "expand")."""
    routed: ClassVar[bool] = False
    """Has a `mixer.router` that sends tokens to experts."""
    rotary: ClassVar[bool] = False
    """Attends to earlier tokens, so it may need rotary position embeddings; `rotates` says so of a model."""
    cut: ClassVar[Cannot | None] = Cannot("this kind of layer passes no state between ranks")
    """Why parallel.context cannot cut its sequences; None: it can."""
    recompute: ClassVar[frozenset[str]] = frozenset({"layers"})
    """The values of training.recompute that recompute this layer."""
    writes_to_residual: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of weights whose output joins the residual stream."""
    by_adam: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of matrices that optimizer.kind=muon leaves to Adam."""
    kept_in_fp32: ClassVar[tuple[str, ...]] = ()
    """Parameters of the mixer that stay fp32 in a bf16 model."""
    widens: ClassVar[bool] = False
    """Whether `model.mup` may grow it: the rule is derived for its weights, and rows that do not grow are readouts."""
    elementwise: ClassVar[frozenset[str]] = frozenset()
    """The parts of `flops` that are no matrix products, such as a scan."""

    @classmethod
    def unanswered(cls) -> list[str]:
        return [] if len(getattr(cls, "letter", "?")) == 1 else ["letter (one character)"]

    def problems(self, model: ModelConfig) -> list[str]:
        """Return what the config lacks or gets wrong for this kind."""
        return []

    def rotates(self, model: ModelConfig) -> bool:
        """Return whether its layers get rotary position embeddings."""
        return self.rotary

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that this kind sets."""
        return {}

    @abstractmethod
    def divisions(self, model: ModelConfig) -> list[Division]:
        """Return the sizes that parallelism splits."""

    @abstractmethod
    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        """Return the parts that parameters are counted by, and the fraction of each that one token uses."""

    @abstractmethod
    def part_of(self, parameter: str) -> str:
        """Return the part that a parameter of the mixer belongs to."""

    @abstractmethod
    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        """Return the mixer's parameters by canonical name: `by_rows`, `by_columns` or `whole` of `kinds.rows`."""

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of each."""
        weights = self.weights(model)
        for name, weight in weights.items():
            if not isinstance(weight, Weight):
                raise KindError(
                    f"{type(self).__name__}.weights says {weight} of {name}, but not how tensor parallelism spreads it."
                    f" Name its rows in by_rows(columns, name=rows), by_columns or whole (docs/extending.md)."
                )
        return {name: weight.shape for name, weight in weights.items()}

    def stored(self, model: ModelConfig) -> dict[str, Weight | Stack]:
        """Return the weights as the mixer's module and checkpoints hold them: those that are stacked, as stacks."""
        stacks = self.stacks(model)
        parts = {part for stack in stacks.values() for part in stack.parts}
        return {name: weight for name, weight in self.weights(model).items() if name not in parts} | stacks

    def stacks(self, model: ModelConfig) -> dict[str, Stack]:
        """Return the parameters that checkpoints store stacked, by their name there. The others keep their names."""
        return {}

    @abstractmethod
    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        """Return the initial value of a parameter of the mixer, fp32; None: normal, with model.init's deviation."""

    @abstractmethod
    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Return the forward FLOPs of one layer per token, by part."""

    @abstractmethod
    def kept(self, at: Sizes) -> int:
        """Return the bytes that the mixer keeps for the backward pass."""

    def working(self, at: Sizes) -> int:
        """Return the bytes that its backward pass needs in addition; by default, the gradients of what it keeps."""
        return self.kept(at)

    @abstractmethod
    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the bytes that a layer sends in a micro-batch, by field of ParallelConfig, as if nothing stayed local.

        passes: 2 for forward and backward, 3 if recomputation repeats the forward pass. A tensor-parallel layer gathers
            and scatters the stream in each, and gathers it once more for the weight gradients: 2 * passes + 1 times.
        """

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

    @abstractmethod
    def exported(self, model: ModelConfig) -> str | Cannot:
        """Return the layer's entry in an export's list of layers."""

    def imported(self, entry: str) -> Mapping[str, Any] | None:
        """Return the config fields that an entry of that list means; None: it is not this kind's."""
        return None

    entry: ClassVar[str] = ""
    """What such an entry looks like, for messages."""
    released: ClassVar[bool] = False
    """Whether the released BlackMamba format has a character for it."""

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of an export's config.json that only this kind needs."""
        return {}

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config fields that they mean."""
        return {}

    @abstractmethod
    def decoding(self, model: ModelConfig) -> Decoding | Cannot:
        """Return how the layer decodes."""
