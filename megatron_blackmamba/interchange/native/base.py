"""Models of other families as tables: keys of their config.json, names of their tensors, and ours for each.

An architecture is one file with a class of tables. Reading and writing here is the same for all. Whether a model of
ours is one of theirs is decided by going there and back: a key that returns with another value is in the way.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import HEAD, Canonical, Entry, InterchangeError, same_tensor, shapes
from megatron_blackmamba.interchange.json_config import layer_count, need, validated
from megatron_blackmamba.layers import MTP, Weight, kind_of, kinds_in, unread_keys
from megatron_blackmamba.layers.attention import kind as attention
from megatron_blackmamba.layers.mamba2 import kind as mamba2

EMBEDDING = "embedding.word_embeddings.weight"
REQUIRED = object()
LENGTH = "max_position_embeddings"
UNBOUNDED = 2**20
"""Positions of a model that has no longest sequence, where a file must name a number; llama.cpp's converter too."""
WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "use_cache", "initializer_range"),
        *("id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict", "problem_type"),
        *("chunk_size_feed_forward", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
        *("residual_in_fp32", "chunk_size", "num_hidden_layers", LENGTH, "attn_implementation"),
    }
)
"""Keys that change no output of given weights, and those that every architecture here reads."""
ONLY_TRAIN = ("init", "z_loss", "mtp.loss", "router.aux_loss", "router.z_loss", "router.bias_update_rate")
"""Keys of ours that change no output of given weights."""


def positions(model: Canonical) -> int | None:
    """Return the number of positions: as trained where attention rotates; None where no layer attends."""
    kinds = kinds_in(model.config.pattern)
    if any(kind.rotates(model.config) for kind in kinds):
        return model.sequence_length
    return UNBOUNDED if any(kind.rotary for kind in kinds) else None


class Field(NamedTuple):
    """Our key for one of theirs, with the value that theirs has where it is missing."""

    ours: str
    default: Any = REQUIRED
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[ModelConfig], Any] | None = None
    """None: the value of our key."""


@dataclass(frozen=True)
class Rows:
    """One of our tensors: theirs stacked, with the rows in another order if `order` is given."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    order: Callable[[], Tensor] | None = None


Names = str | tuple[str, ...]
"""Their name of a tensor; of two or three, whose rows are stacked in ours: gate and up, or queries, keys and values.

`name[{e}]` is a part of a tensor that holds all experts of a layer.
"""


class Architecture(ABC):
    """A family of models in transformers."""

    model_type: ClassVar[str]
    class_name: ClassVar[str]
    fields: ClassVar[Mapping[str, Field]]
    """Their keys that have one of ours."""
    fixed: ClassVar[Mapping[str, Any]]
    """Their keys of which only one value converts."""
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The same for keys that exports leave at their default, with several ways to write the value."""
    ours: ClassVar[Mapping[str, Any]]
    """Our keys that have one value in this family."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Their keys that change no output, beside those of every family."""
    layers: ClassVar[str]
    """The start of a layer's names, with {i}."""
    ends: ClassVar[tuple[str, str]]
    """The names of the embedding and of the last norm."""
    names: ClassVar[Mapping[str, Mapping[str, Names]]]
    """By the letter of a layer, our names in it and theirs; {e} is the number of an expert."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Other starts of names that files may have."""
    extra: ClassVar[str | None] = None
    """The start of names of the extra depth's tensors. Import leaves them out and says so if config.json has none."""
    extra_names: ClassVar[Mapping[str, str]] = {}
    """Our names in the extra depth outside its layers and theirs; {last} is the number of its last layer."""
    turns_neighbours: ClassVar[bool] = False
    """Whether llama.cpp rotates neighbouring channels of queries and keys, whose rows are then reordered."""
    per_layer: int = 1
    """The number of our letters for one of their layers."""

    @abstractmethod
    def pattern(self, content: Mapping[str, Any], path: Path) -> str:
        """Return our pattern for a config.json."""

    @abstractmethod
    def counted(self, pattern: str) -> dict[str, Any] | None:
        """Return their keys for a pattern; None: they have no such models."""

    def advice(self) -> str:
        """Return which patterns are theirs."""
        return f"use {', '.join(self.names)} alone"

    def refused(self, model: ModelConfig) -> list[str]:
        """Return what else is in the way of an export."""
        return []

    def more_exported(self, model: ModelConfig) -> dict[str, Any]:
        """Return keys that no table expresses."""
        return {}

    def more_imported(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return our keys for those, and remove them from the content."""
        return {}

    @abstractmethod
    def in_llama_cpp(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of a GGUF file that describe a model: what GGUFWriter adds, by the ends of its methods."""

    def tensors_for_llama_cpp(self, model: Canonical) -> dict[str, Entry]:
        """Return their tensors under names for which the package gguf has llama.cpp's."""
        return self.in_file(model)

    def refused_by_llama_cpp(self, model: ModelConfig) -> list[str]:
        """Return the keys of a model of this family that llama.cpp does not run."""
        return []

    def name_in_llama_cpp(self, model: ModelConfig) -> str:
        """Return llama.cpp's name of the family."""
        return self.model_type

    def exported(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that describe a model."""
        flat = flattened(model)
        values = {name: field.write(model) if field.write else flat[field.ours] for name, field in self.fields.items()}
        written = {name: value for name, value in values.items() if value is not None}  # no layer reads the others
        return {**written, **self.fixed, **(self.counted(model.pattern) or {}), **self.more_exported(model)}

    def imported(self, content: Mapping[str, Any], path: Path) -> ModelConfig:
        """Return our config for a config.json; refuse each key that does not convert, by name and value."""
        for name, value in self.fixed.items():
            self._refuse_other(content, name, (value,), path)
        for name, values in self.only.items():
            self._refuse_other(content, name, values, path)
        ours = {"pattern": self.pattern(content, path), **self.ours}
        left = dict(content)
        ours |= self.more_imported(left, path)
        for name, field in self.fields.items():
            value = need(dict(content), name, path) if field.default is REQUIRED else content.get(name, field.default)
            try:
                ours[field.ours] = field.read(value)
            except TypeError:
                raise InterchangeError(f"{path}: {name} is {value!r}, a {type(value).__name__}") from None
        known = {
            *self.fields,
            *self.fixed,
            *self.only,
            *self.ignored,
            *WITHOUT_EFFECT,
            *(self.counted(ours["pattern"]) or {}),
        }
        unknown = [name for name, value in left.items() if name not in known and value not in (None, False, 0, [], {})]
        if unknown:
            found = ", ".join(f"{name} is {left[name]!r}" for name in unknown)
            raise InterchangeError(
                f"{path}: {found}, which import does not know for {self.model_type}. Remove what changes no output,"
                " but never a size, which would then have another value"
            )
        unread = tuple(f"{key}." for key in unread_keys(ours["pattern"]))
        read = {key: value for key, value in ours.items() if not f"{key}.".startswith(unread)}
        return validated(_nested(read), path, {name: field.ours for name, field in self.fields.items()})

    def obstacles(self, model: ModelConfig) -> list[str]:
        """Return the keys of a model that keep it from being one of theirs, with the value that would not."""
        if self.counted(model.pattern) is None:
            return [f"model.pattern={model.pattern}: {self.advice()}"]
        mine, found = resolved(model), self.refused(model)
        try:
            back = resolved(self.imported(self.exported(model), Path("config.json")))
        except InterchangeError as error:
            return [*found, str(error)]
        other = [f"model.{key}={_said(mine[key])}: set {_said(back[key])}" for key in mine if mine[key] != back[key]]
        return found + other

    def tensors(self, model: ModelConfig) -> dict[str, Rows]:
        """Return their tensors for each of ours."""
        embedding, norm = self.ends
        found = {}
        declared = {letter: kind_of(letter).weights(model) for letter in set(model.trained_pattern)}
        ahead = model.mtp.pattern or ""
        for name, shape in shapes(model).items():
            if name.startswith("decoder.layers."):
                found[name] = self._in_layer(name, shape, self.layers, model.pattern, declared)
            elif name.startswith(f"{MTP}.layers."):
                found[name] = self._in_layer(name, shape, f"{self.extra}layers.{{i}}.", ahead, declared)
            elif name.startswith(f"{MTP}."):
                theirs = self.extra_names[name.removeprefix(f"{MTP}.")].format(last=len(ahead) - 1)
                found[name] = Rows((f"{self.extra}{theirs}",), shape[:1])
            else:
                theirs = embedding if name == EMBEDDING else "lm_head.weight" if name == HEAD else norm
                found[name] = Rows((theirs,), shape[:1])
        return found

    def _in_layer(
        self,
        name: str,
        shape: tuple[int, ...],
        layers: str,
        pattern: str,
        declared: Mapping[str, Mapping[str, Weight]],
    ) -> Rows:
        _, _, number, own = name.split(".", 3)
        index, expert = int(number), ""
        weight = declared[pattern[index]].get(own.removeprefix("mixer."))
        if own.startswith("mixer.local_experts."):
            _, _, expert, rest = own.split(".", 3)
            own = f"mixer.local_experts.{{e}}.{rest}"
        names = self.names[pattern[index]][own]
        start = layers.format(i=index // self.per_layer)
        names = tuple(start + each.format(e=expert) for each in ((names,) if isinstance(names, str) else names))
        if weight is None or len(names) == 1:
            return Rows(names, shape[:1])
        sizes = tuple(weight.count(part) for part in weight.rows)
        return Rows(names, sizes, (lambda: _by_group(sizes, weight.groups)) if weight.groups > 1 else None)

    def canonical(self, model: ModelConfig, entries: Mapping[str, Entry], source: Path) -> dict[str, Entry]:
        """Return our tensors, made of theirs; refuse missing, unexpected and wrongly shaped ones by their names."""
        left: dict[str, Entry] = {}
        for name, entry in entries.items():
            if self.known(name) in left:
                raise InterchangeError(f"{source}: holds {self.known(name)} twice, under another name too")
            if not name.endswith(".inv_freq"):  # follows from the config
                left[self.known(name)] = entry
        head = left.get("lm_head.weight")
        if model.tie_embeddings and head is not None:
            if not same_tensor(head, left.get(self.ends[0])):
                raise InterchangeError(
                    f"{source}: lm_head.weight differs from {self.ends[0]}, to which the config ties it"
                )
            del left["lm_head.weight"]
        found, whole, all_rows = {}, shapes(model), self.tensors(model)
        _separate(left, {name.partition("[")[0] for rows in all_rows.values() for name in rows.names if "[" in name})
        for name, rows in all_rows.items():
            parts = [
                _taken(left, theirs, (size, *whole[name][1:]), source)
                for theirs, size in zip(rows.names, rows.sizes, strict=True)
            ]
            if len({part.dtype for part in parts}) > 1:
                raise InterchangeError(f"{source}: {' and '.join(rows.names)} have different types; save them in one")
            found[name] = parts[0] if len(parts) == 1 else Entry(whole[name], parts[0].dtype, _joining(parts, rows))
        if left:
            some = ", ".join(list(left)[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise InterchangeError(f"{source}: holds {some}, which a {self.model_type} of this config does not have")
        return found

    def in_file(self, model: Canonical) -> dict[str, Entry]:
        """Return their tensors, made of ours."""
        found, all_rows = {}, self.tensors(model.config)

        @lru_cache(maxsize=1)  # the parts of a tensor are read one after the other
        def whole(name: str) -> Tensor:
            order, tensor = all_rows[name].order, model.entries[name].load()
            return tensor if order is None else tensor[order().argsort()]

        for name, rows in all_rows.items():
            entry, first = model.entries[name], 0
            for theirs, size in zip(rows.names, rows.sizes, strict=True):
                load = partial(_rows, whole, name, first, size)
                cut = replace(entry, shape=(size, *entry.shape[1:]), load=load)
                found[theirs] = entry if len(rows.names) == 1 else cut
                first += size
        return _together(found)

    def known(self, name: str) -> str:
        """Return the usual name of a tensor that files may have under another one."""
        start = next((start for start in self.renamed if name.startswith(start)), "")
        return self.renamed[start] + name.removeprefix(start) if start else name

    def _refuse_other(self, content: Mapping[str, Any], name: str, values: Sequence[Any], path: Path) -> None:
        if name in content and content[name] not in values:
            raise InterchangeError(f"{path}: {name} is {content[name]!r}; only {values[0]!r} converts")


class Uniform(Architecture):
    """A family whose layers are all one unit of our letters, hybrids with such a unit included."""

    unit: ClassVar[str]
    """Our letters for one of their layers."""

    @property
    def per_layer(self) -> int:  # type: ignore[override]
        return len(self.unit)

    def advice(self) -> str:
        return f"repeat {self.unit}"

    def pattern(self, content: Mapping[str, Any], path: Path) -> str:
        return self.unit * layer_count(need(dict(content), "num_hidden_layers", path), "num_hidden_layers", path)

    def counted(self, pattern: str) -> dict[str, Any] | None:
        layers = len(pattern) // len(self.unit)
        return {"num_hidden_layers": layers} if layers and pattern == self.unit * layers else None


def resolved(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that decide a model's outputs, with values in place of defaults that follow from others."""
    unread = tuple(f"{key}." for key in (*unread_keys(model.pattern), *ONLY_TRAIN))
    flat = {key: value for key, value in flattened(model).items() if not f"{key}.".startswith(unread)}
    return {key: _DERIVED[key](model) if key in _DERIVED else value for key, value in flat.items() if key != "expand"}


def heads_of_mamba2(model: ModelConfig) -> int:
    return mamba2.sizes(model)[1]


_DERIVED: Mapping[str, Callable[[ModelConfig], Any]] = {
    "dt_rank": lambda model: model.dt_rank_or_default,
    "attention.kv_heads": attention.kv_heads,
    "attention.head_dim": attention.head_dim,
    "mamba2.heads": heads_of_mamba2,
    "multipliers.attention": lambda model: model.attention_scale,
}


def flattened(model: ModelConfig) -> dict[str, Any]:
    """Return every key of a model with its value, such as "router.kind"."""

    def walk(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in content.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(model.model_dump(), ""))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, last = key.rpartition(".")
        (content.setdefault(section, {}) if section else content)[last] = value
    return content


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _by_group(sizes: tuple[int, ...], groups: int) -> Tensor:
    """Return the rows of parts that follow one another in our order: group by group its share of each."""
    parts = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.view(groups, -1) for part in parts], dim=1).flatten()


def _separate(left: dict[str, Entry], names: set[str]) -> None:
    """Replace tensors that hold all experts of a layer by one for each expert."""
    held = {name: left.pop(name) for name in names if name in left and left[name].shape}

    @lru_cache(maxsize=2)  # the tensors of an expert are read one after the other
    def whole(name: str) -> Tensor:
        return held[name].load()

    for name, entry in held.items():
        for i in range(entry.shape[0]):
            load = partial(lambda name, i: whole(name)[i].clone(), name, i)
            left[f"{name}[{i}]"] = Entry(entry.shape[1:], entry.dtype, load)


def _together(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tensors, each layer's experts as one tensor if the architecture joins them."""
    parts: dict[str, list[Entry]] = {}
    for name, entry in found.items():
        parts.setdefault(name.partition("[")[0], []).append(entry)
    return {name: stacked(each) if name not in found else each[0] for name, each in parts.items()}


def stacked(entries: Sequence[Entry]) -> Entry:
    """Return several tensors as one with another dimension."""
    first = entries[0]
    return Entry((len(entries), *first.shape), first.dtype, lambda: torch.stack([entry.load() for entry in entries]))


def _taken(left: dict[str, Entry], name: str, shape: tuple[int, ...], source: Path) -> Entry:
    entry = left.pop(name, None)
    if entry is None:
        raise InterchangeError(f"{source}: has no {name}, which its config requires")
    if entry.shape != shape:
        found, wanted = ("×".join(map(str, each)) for each in (entry.shape, shape))
        raise InterchangeError(f"{source}: {name} is {found}; its config says {wanted}")
    return entry


def _joining(parts: Sequence[Entry], rows: Rows) -> Callable[[], Tensor]:
    def load() -> Tensor:
        stacked = torch.cat([part.load() for part in parts])
        return stacked if rows.order is None else stacked[rows.order()]

    return load


def _rows(whole: Callable[[str], Tensor], name: str, first: int, size: int) -> Tensor:
    return whole(name)[first : first + size].clone()
