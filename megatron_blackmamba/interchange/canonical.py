"""The intermediate form of every conversion: a model's config, and its tensors by name, read one at a time.

The released checkpoint and a Hugging Face export both use these names. A reader lists its tensors without loading them.
A writer requests one tensor after another, so no conversion needs more memory than the largest tensor.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba import norms
from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.formats.evaluations import Evaluation
from megatron_blackmamba.layers import MTP, around_mixer, kinds_in, layers_of, obstacles
from megatron_blackmamba.tokenizer import Tokenizer, load_tokenizer

MTP_NORMS = ("embedding_norm.weight", "hidden_norm.weight", "final_norm.weight")
HEAD = "output_layer.weight"
"""The output layer, with model.tie_embeddings=false."""
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class InterchangeError(ValueError):
    """Weights that cannot be read or converted; the message names the file and the field."""


@dataclass(frozen=True)
class Entry:
    """One tensor, not yet loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Past:
    """Facts about the run that trained a model, for the model card."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class Canonical:
    """A model to be converted. Making one checks that it is whole: every name, every shape, nothing more."""

    config: ModelConfig
    entries: Mapping[str, Entry]
    source: str
    """The file or folder it comes from, for messages."""
    tokenizer: Path | None = None
    sequence_length: int = 2048
    past: Callable[[], Past] = Past
    """Reads what is known of the run behind it; only the model card calls this, as it takes a run's whole history."""
    license: str = "unknown"
    """An identifier of the Hugging Face hub, for the model card."""
    ema: bool = False
    """Whether these are the averaged weights of a checkpoint."""
    unread: tuple[str, ...] = ()
    """Tensors of the source that it leaves out, for messages."""
    eod_id: int | None = None
    """The id that ends documents, if the source records it; else the tokenizer's files tell."""

    def __post_init__(self) -> None:
        expected = shapes(self.config)
        missing = [name for name in expected if name not in self.entries]
        unexpected = [name for name in self.entries if name not in expected]
        if missing:
            raise InterchangeError(f"{self.source}: has no {_some(missing)}, which its config requires")
        if unexpected:
            raise InterchangeError(f"{self.source}: holds {_some(unexpected)}, which its config does not define")
        for name, shape in expected.items():
            entry = self.entries[name]
            if entry.shape != shape:
                raise InterchangeError(f"{self.source}: {name} is {_by(entry.shape)}; its config says {_by(shape)}")
            if entry.dtype not in FLOAT_TYPES:
                advice = " Start an fp32 run from it with start.from." if entry.dtype == torch.float64 else ""
                raise InterchangeError(
                    f"{self.source}: {name} is {entry.dtype}; weights are fp32, bf16 or fp16.{advice}"
                )
        object.__setattr__(self, "entries", {name: self.entries[name] for name in expected})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name and its tensor, in the order of the network; drop each one to use little memory."""
        for name, entry in self.entries.items():
            yield name, entry.load()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of most weights."""
        sizes: Counter[torch.dtype] = Counter()
        for entry in self.entries.values():
            sizes[entry.dtype] += torch.Size(entry.shape).numel()
        return sizes.most_common(1)[0][0]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    @property
    def parameters(self) -> int:
        return sum(torch.Size(entry.shape).numel() for entry in self.entries.values())


def tokenizer_of(model: Canonical) -> Tokenizer | None:
    """Return the model's tokenizer, if any; refuse one with ids that have no embedding."""
    if model.tokenizer is None:
        return None
    tokenizer = load_tokenizer(model.tokenizer, eod=model.eod_id)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise InterchangeError(
            f"{model.tokenizer}: has ids up to {tokenizer.vocab_size - 1:,}, but vocab_size of {model.source} is "
            f"{model.config.vocab_size:,}: it belongs to another model"
        )
    if model.config.eod_reset not in (None, tokenizer.eod_id):
        raise InterchangeError(
            f"{model.tokenizer}: ends documents with id {tokenizer.eod_id}, but the state of {model.source} restarts "
            f"after id {model.config.eod_reset} (model.eod_reset): it belongs to another model"
        )
    return tokenizer


def in_memory(
    config: ModelConfig, weights: Mapping[str, Tensor], source: str = "a state dict in memory", **more: Any
) -> Canonical:
    entries = {name: Entry(tuple(w.shape), w.dtype, lambda w=w: w) for name, w in weights.items()}  # type: ignore[misc]
    return Canonical(config, entries, source, **more)


def cast(model: Canonical, dtype: torch.dtype | None, like: Canonical | None = None) -> Canonical:
    """Return the same model in another precision; parameters of the recurrence become fp32.

    Without `dtype`, each other tensor has the precision that it has in `like`, by default its own.
    """
    kept, own = kept_in_fp32(model.config), (like or model).entries
    types = {name: torch.float32 if name.endswith(kept) else dtype or own[name].dtype for name in model.entries}
    return replace(model, entries={name: converted(entry, types[name]) for name, entry in model.entries.items()})


def finite(model: Canonical) -> Canonical:
    """Return the same model; reading a tensor that contains NaN or infinity raises an error with its name."""

    def read(name: str, entry: Entry) -> Tensor:
        tensor = entry.load()
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise InterchangeError(
                f"{model.source}: {name} holds NaN or infinity ({bad:,} of {tensor.numel():,} values): training "
                "had diverged, or the file is damaged. Use an earlier checkpoint"
            )
        return tensor

    return _read_by(read, model)


def _read_by(read: Callable[[str, Entry], Tensor], model: Canonical) -> Canonical:
    """Return the same model, whose tensors a function reads by their names."""
    entries = {name: replace(entry, load=partial(read, name, entry)) for name, entry in model.entries.items()}
    return replace(model, entries=entries)


def converted(entry: Entry, dtype: torch.dtype) -> Entry:
    """Return the same tensor in another precision."""
    return entry if entry.dtype == dtype else Entry(entry.shape, dtype, lambda: entry.load().to(dtype))


def as_fp32(entries: Mapping[str, Entry], dtype: torch.dtype) -> dict[str, Entry]:
    """Return the tensors of a dtype as fp32, the precision in which the model computes, and all others unchanged."""
    return {name: converted(entry, torch.float32) if entry.dtype == dtype else entry for name, entry in entries.items()}


def kept_in_fp32(config: ModelConfig) -> tuple[str, ...]:
    """Return the ends of the names that stay fp32 in every precision."""
    return tuple(f".mixer.{name}" for kind in kinds_in(config.pattern) for name in kind.kept_in_fp32)


def watched(model: Canonical, loaded: Callable[[int], None]) -> Canonical:
    """Return the same model, which calls `loaded` with the bytes of each tensor after reading it."""

    def read(_: str, entry: Entry) -> Tensor:
        tensor = entry.load()
        loaded(entry.bytes)
        return tensor

    return _read_by(read, model)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a model by its canonical name, in the order of the network."""
    D = config.hidden_size
    result: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (config.vocab_size, D)}
    for i, kind in enumerate(layers_of(config.pattern)):
        result |= {f"decoder.layers.{i}.{name}": (D,) for name in around_mixer(config, i)}
        result |= {f"decoder.layers.{i}.mixer.{name}": shape for name, shape in kind.shapes(config).items()}
    result |= {f"{norms.PREFIX}{name}": (D,) for name in norms.kind_of(config.final_norm).parameters}
    if config.mtp.pattern:
        result |= {f"{MTP}.{name}": (D,) for name in MTP_NORMS} | {f"{MTP}.proj.weight": (D, 2 * D)}
        for i, kind in enumerate(layers_of(config.mtp.pattern)):
            result[f"{MTP}.layers.{i}.norm.weight"] = (D,)
            result |= {f"{MTP}.layers.{i}.mixer.{name}": shape for name, shape in kind.shapes(config).items()}
    return result if config.tie_embeddings else {**result, HEAD: (config.vocab_size, D)}


def without_extra_depth(config: ModelConfig) -> ModelConfig:
    """Return the config of the model that other formats hold: the extra depth (model.mtp) stays behind."""
    return config.model_copy(update={"mtp": type(config.mtp)()})


def main_depth(model: Canonical) -> Canonical:
    """Return the same model without its extra depth."""
    if not model.config.mtp.pattern:
        return model
    config = without_extra_depth(model.config)
    return replace(model, config=config, entries={name: model.entries[name] for name in shapes(config)})


def same_tensor(one: Entry, other: Entry | None) -> bool:
    """Return whether two tensors have equal values."""
    return other is not None and one.shape == other.shape and torch.equal(one.load(), other.load())


def require_convertible(config: ModelConfig, source: str) -> None:
    """Refuse a model that other formats cannot hold, naming the field that is in the way."""
    reasons = obstacles(config)
    if reasons:
        raise InterchangeError(f"{source}: {'; '.join(reasons)}")


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"
