"""The questions that a layer kind answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property, partial
from itertools import zip_longest
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_blackmamba.layers.cost import Cost, CostOfWeights
from megatron_blackmamba.layers.decoding import Decoding
from megatron_blackmamba.layers.recurrent import KindDecoding
from megatron_blackmamba.layers.rows import ROWS, WHOLE, Stack, Weight
from megatron_blackmamba.registry import Cannot, Kind, KindError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig


class Division(NamedTuple):
    """A size that must be divisible by a kind of parallelism."""

    what: str
    size: int
    axis: str
    """A field of ParallelConfig."""


class LayerKind(Kind, ABC):
    """One kind of layer: everything that the rest of the project asks about a letter of `model.pattern`.

    Answers are arithmetic and strings. Import torch inside methods: the config reads kinds too.
    """

    letter: ClassVar[str]
    name: ClassVar[str]
    """For messages and tables, such as "dense MLP"."""
    between: ClassVar[Callable[..., Tensor] | None] = None
    """A method that returns what out_proj reads, of a kind whose weights are in_proj, out_proj and vectors or matrices.

    It gets each part of in_proj's rows by its name, `[B, S, part]`, each other weight by its name, and `inputs`, which
    in decoding has reset_BS and keep_BL1 alone; also `settings`, if the kind has any. If `state` names tensors, it gets
    these too, None before the first token, and returns a tuple: its output, and these tensors after the last token.
    """
    mixer: ClassVar[str | None] = None
    """In place of `between`, the torch module as "package.module:class" of (config, layer_number, pg_collection).

    Its `forward` gets the normalised stream and a `LayerInputs`, and returns what joins the residual stream.
    """
    cost: ClassVar[str | None] = None
    """The subclass of Cost, as "package.module:class"; None: that of the products with its weights."""
    decode: ClassVar[str | Cannot | None] = None
    """The subclass of Decoding, as "package.module:class", or why there is none; None: `between` and `state`."""

    keys: ClassVar[tuple[str, ...]] = ()
    """Keys and sections of `model:` that only some kinds read, such as ("attention", "expand")."""
    routed: ClassVar[bool] = False
    """Has a `mixer.router` that sends tokens to experts."""
    rotary: ClassVar[bool] = False
    """Attends to earlier tokens, so it may need rotary position embeddings; `rotates` says so of a model."""
    cut: ClassVar[Cannot | None] = Cannot("this kind of layer passes no state between ranks")
    """Why parallel.context cannot cut its sequences; None: it can. A state needs a `mixer` then."""
    recompute: ClassVar[frozenset[str]] = frozenset({"layers"})
    """The values of training.recompute that recompute this layer."""
    writes_to_residual: ClassVar[tuple[str, ...]] = ("out_proj.weight",)
    """Ends of the names of weights whose output joins the residual stream."""
    by_adam: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of matrices that optimizer.kind=muon leaves to Adam."""
    kept_in_fp32: ClassVar[tuple[str, ...]] = ()
    """Parameters of the mixer that stay fp32 in a bf16 model."""
    widens: ClassVar[bool] = False
    """Whether `model.mup` may grow it: the rule is derived for its weights, and rows that do not grow are readouts."""

    @classmethod
    def unanswered(cls) -> list[str]:
        missing = [] if len(getattr(cls, "letter", "?")) == 1 else ["letter (one character)"]
        return missing + ["between, or mixer"] * (cls.between is None and cls.mixer is None)

    def problems(self, model: ModelConfig) -> list[str]:
        """Return what the config lacks or gets wrong for this kind."""
        return []

    def carried(self, model: ModelConfig) -> int:
        """Return how many numbers a token takes from one of its layers to the next, beside the residual stream."""
        return 0

    def uncut(self, model: ModelConfig) -> Cannot | None:
        """Return why parallel.context cannot cut its sequences, or None."""
        kept = self.cut is None and self.mixer is None and self.state(model)
        return Cannot("`between` hands its state to no rank. Write a mixer that does") if kept else self.cut

    def rotates(self, model: ModelConfig) -> bool:
        """Return whether its layers get rotary position embeddings."""
        return self.rotary

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that this kind sets."""
        return {}

    def divisions(self, model: ModelConfig) -> list[Division]:
        """Return the sizes that parallelism splits; by default, those of the weights."""
        return [
            Division(f"a size of {name} in {self.name} layers ({self.letter})", size, "tensor")
            for name, weight in self.weights(model).items()
            if weight.spread != WHOLE
            for size in (weight.pieces if weight.spread == ROWS else weight.columns[:1])
        ]

    part: ClassVar[str] = ""
    """The name that all its parameters are counted by; a kind of several parts overrides `parts` and `part_of`."""

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        """Return the parts that parameters are counted by, and the fraction of each that one token uses."""
        return {self.part or self.name: Fraction(1)}

    def part_of(self, parameter: str) -> str:
        """Return the part that a parameter of the mixer belongs to."""
        return self.part or self.name

    @abstractmethod
    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        """Return the mixer's parameters by canonical name: `by_rows`, `by_columns` or `whole` of `layers.rows`."""

    def state(self, model: ModelConfig) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of what `between` remembers of a sequence, by name; {}: nothing; None: it cannot decode."""
        return None

    def computed(self, rows: Weight, projected: Tensor, given: Any, model: ModelConfig, before: Any = ()) -> Any:
        """Return what `between` computes of in_proj's rows, in their dtype, and the state behind them.

        Args:
            given: The other weights, and `inputs`.
            before: The state before them; by default None.
        """
        named = tuple(self.state(model) or ())
        given = given | dict(zip(rows.rows, rows.split(projected), strict=True)) | dict(zip_longest(named, before))
        given |= {"settings": self.settings_in(model)} if self.settings else {}
        found = self.between(**given)  # type: ignore[misc]
        y, *after = found if isinstance(found, tuple) else (found,)
        if len(after) != len(named):
            raise KindError(f"{type(self).__name__}.between returned {len(after)} states, and state names {named}")
        return [y.to(projected.dtype), *after]

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of each."""
        weights = self.weights(model)
        for name, weight in weights.items():
            if not isinstance(weight, Weight):
                raise KindError(
                    f"{type(self).__name__}.weights says {weight} of {name}, but not how tensor parallelism spreads it."
                    " Name its rows in by_rows(columns, name=rows), by_columns or whole (docs/extending.md)."
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

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        """Return the initial value of a parameter of the mixer, fp32; None: normal, with model.init's deviation."""
        return None

    entry: ClassVar[str | Cannot | None] = None
    """The layer's entry in an export's list of layers, or why there is none."""

    def exported(self, model: ModelConfig) -> str | Cannot:
        """Return the entry of a model's layers."""
        return self.entry or Cannot(f"{self.name} layers ({self.letter}) have no class in the modeling files")

    def imported(self, entry: str) -> Mapping[str, Any] | None:
        """Return the config fields that an entry means; None: it is not this kind's."""
        return {} if entry == self.entry else None

    @property
    def form(self) -> str:
        """Return what its entries look like, for messages."""
        return f'"{self.entry}"'

    released: ClassVar[bool] = False
    """Whether the released BlackMamba format has a character for it."""

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of an export's config.json that only this kind needs."""
        return {}

    def derived_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return those whose null follows from others, with the value that follows."""
        return {}

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config fields that they mean."""
        return {}

    @cached_property
    def costs(self) -> Cost:
        return self._made("cost")() if self.cost else CostOfWeights(self.part or self.name, self.weights)

    def decoding(self, model: ModelConfig) -> Decoding | Cannot:
        """Return how the layer decodes."""
        if self.decode is None and self.mixer is None and self.state(model) is not None:
            return KindDecoding(self.weights(model)["in_proj.weight"], self)
        if self.decode is None:
            what, kind = f"{self.name} layers ({self.letter}) cannot generate, nor be scored", type(self).__name__
            return Cannot(f"{what}: {kind} has no `state` beside `between`, nor `decode` (docs/extending.md)")
        return self.decode if isinstance(self.decode, Cannot) else self._made("decode").of(model)

    @property
    def module(self) -> Callable[..., Any]:
        """Return what makes the mixer."""
        if self.mixer is None:
            return partial(resolve_name("megatron_blackmamba.model.recurrent_mixer:KindMixer"), kind=self)
        return self.named("mixer")

    def _made(self, file: str) -> Any:
        """Return the class that `cost` or `decode` names; refuse one that leaves a question open, by its name."""
        found = self.named(file)
        if missing := sorted(found.__abstractmethods__):
            raise KindError(f"{found.__name__} does not define: {', '.join(missing)}. Define each.")
        return found
