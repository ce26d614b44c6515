"""Hugging Face folders, in and out: config.json, sharded safetensors, tokenizer, modeling files and model card."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from megatron_blackmamba import norms, routers
from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.formats.atomic import write_json, write_text
from megatron_blackmamba.interchange import files, safetensors_io
from megatron_blackmamba.interchange.canonical import (
    HEAD,
    Canonical,
    Entry,
    InterchangeError,
    require_convertible,
    same_tensor,
    tokenizer_of,
)
from megatron_blackmamba.interchange.json_config import layer_list, model_config, need, read_json, trained_length
from megatron_blackmamba.interchange.model_card import model_card
from megatron_blackmamba.layers import kinds_in, routes, unread_keys
from megatron_blackmamba.registry import Kind, KindError

_PARTS = ("cache", "configuration", "functions", "layers", "recurrent", "modeling")
MODELING_FILES = tuple(f"{part}_blackmamba.py" for part in _PARTS)
AUTO_MAP = {
    "AutoConfig": "configuration_blackmamba.BlackMambaConfig",
    "AutoModel": "modeling_blackmamba.BlackMambaModel",
    "AutoModelForCausalLM": "modeling_blackmamba.BlackMambaForCausalLM",
}
ADAPTER = "adapter_config.json"
MODEL_TYPE = "blackmamba"
INDEX = files.index_of(files.SAFETENSORS)
PREFIX = "model."  # of every parameter, before its canonical name
LM_HEAD = "lm_head.weight"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # 5.x would write a class of its own, which 4.x does not know
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_BYTES = 4 * 10**9

_UNKNOWN_THERE = re.compile(r"^\s*(from|import) (megatron_blackmamba|\.(?!\w+_blackmamba )).*", re.MULTILINE)
"""An import that fails in an export."""

# A field of config.json, and where it lives in ModelConfig.
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "state_size": "state_size",
    "conv_dimension": "conv_kernel",
    "expansion_factor": "expand",
    "ffn_hidden_size": "expert_hidden_size",
    "activation": "activation",
    "eod_reset": "eod_reset",
    "norm_eps": "norm_eps",
    "final_norm": "final_norm",
    "arrangement": "arrangement",
    "residual_scaling": "residual_scaling",
    "logit_softcap": "logit_softcap",
}

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
"""Granite's names of model.multipliers. They contain what a width transfer adds, which an export does not know."""


def write(
    model: Canonical,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    write_files: Callable[[safetensors_io.Files], None] = safetensors_io.write_files,
) -> None:
    """Fill `folder` with all that `from_pretrained(folder, trust_remote_code=True)` needs; the index comes last."""
    require_convertible(model.config, model.source)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(in_file(model), folder, shard_bytes, write_files)
    write_rest(model, folder)


def in_file(model: Canonical) -> dict[str, Entry]:
    """Return the tensors under their names in the files."""
    return {name_in_file(name): entry for name, entry in model.entries.items()}


def write_weights(
    entries: Mapping[str, Entry],
    folder: Path,
    shard_bytes: int,
    write_files: Callable[[safetensors_io.Files], None] = safetensors_io.write_files,
) -> None:
    """Write weight files of at most `shard_bytes`, and the index of several."""
    weights = weight_files(safetensors_io.shards(entries, shard_bytes))
    write_files({folder / name: part for name, part in weights.items()})
    write_index(folder, weights, sum(entry.bytes for entry in entries.values()))


def weight_parts(entries: Mapping[str, Entry], shard_bytes: int = SHARD_BYTES) -> list[dict[str, Entry]]:
    """Return the contents of the weight files under their names in a file; each holds at most `shard_bytes`."""
    return safetensors_io.shards({name_in_file(name): entry for name, entry in entries.items()}, shard_bytes)


def name_in_file(name: str) -> str:
    """Return the name in a weight file of a canonical name."""
    return LM_HEAD if name == HEAD else PREFIX + name


def weight_files(parts: Sequence[dict[str, Entry]]) -> dict[str, dict[str, Entry]]:
    """Return the contents of the weight files by file name."""
    if len(parts) == 1:
        return {files.SAFETENSORS: parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}


def write_index(folder: Path, weights: Mapping[str, Mapping[str, Entry]], total_bytes: int) -> None:
    """Write the index of several weight files; one file needs none."""
    if len(weights) > 1:
        weight_map = {tensor: name for name, part in weights.items() for tensor in part}
        write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_rest(model: Canonical, folder: Path) -> None:
    """Write all files but the weights and their index."""
    tokens = write_tokenizer(model, folder)
    config = to_json(model.config, model.sequence_length, model.dtype) | tokens
    write_json(folder / "config.json", config | ({"tokenizer_class": TOKENIZER_CLASS} if model.tokenizer else {}))
    write_json(folder / "generation_config.json", tokens)
    for name, text in modeling_files(model.config).items():
        write_text(folder / name, text)
    write_text(folder / "README.md", model_card(model))


def modeling_files(config: ModelConfig) -> dict[str, str]:
    """Return the modeling files of an export by name, with those of kinds that bring their own."""
    package = resources.files("megatron_blackmamba.hf")
    texts = {name: (package / name).read_text("utf-8") for name in MODELING_FILES}
    for table, entry, kind in own_classes(config):
        source, name = Path(inspect.getfile(kind)), kind.__name__
        file = f"{table.lower()}_{re.sub('[^a-zA-Z0-9]', '_', entry)}_blackmamba"
        texts[f"{file}.py"] = text = source.read_text("utf-8").replace("from megatron_blackmamba.hf.", "from .")
        if wrong := _UNKNOWN_THERE.search(text):
            raise KindError(
                f"{source}: an export contains this file, so it may import nothing of the package but "
                f"megatron_blackmamba.hf, not: {wrong[0].strip()}"
            )
        texts["layers_blackmamba.py"] += f"\n\nfrom .{file} import {name}\n\n{table}[{entry!r}] = {name}\n"
    return texts


def own_classes(config: ModelConfig) -> Iterator[tuple[str, str, type]]:
    """Yield the classes of kinds that are not in hf/, with their table in layers_blackmamba.py and entry there."""
    kinds: list[tuple[str, str, Kind]] = [("MIXERS", str(kind.entry), kind) for kind in kinds_in(config.pattern)]
    kinds += [("ROUTERS", config.router.kind, routers.kind_of(config.router.kind))] * routes(config.pattern)
    kinds += [("FINAL_NORMS", config.final_norm, norms.kind_of(config.final_norm))]
    for table, entry, kind in kinds:
        if kind.modeling and not kind.modeling.startswith("megatron_blackmamba.hf."):
            yield table, entry, kind.named("modeling")


def code_files(folder: Path) -> list[Path]:
    """Return the modeling files in an export, of whatever version."""
    return sorted(folder.glob("*_blackmamba.py"))


def read(folder: Path) -> Canonical:
    """Read a folder written by `write`, or by `save_pretrained` of such a model."""
    folder = Path(folder)
    refuse_adapter(folder)
    config, content = read_config(folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    return Canonical(
        config,
        _canonical_names(files.read(folder, (files.SAFETENSORS,)), folder, config.tie_embeddings),
        str(folder),
        tokenizer if tokenizer.is_file() else None,
        trained_length(content, folder / "config.json"),
    )


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder whose weights are not all of the model."""
    if (folder / ADAPTER).is_file():
        raise InterchangeError(
            f"{folder / ADAPTER}: the folder holds an adapter, which transformers adds to the weights. Merge it with "
            "merge_and_unload() and save the model to another folder"
        )


def to_json(config: ModelConfig, sequence_length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a model, without the fields of the tokenizer."""
    return {
        "architectures": ["BlackMambaForCausalLM"],
        "model_type": MODEL_TYPE,
        "auto_map": AUTO_MAP,
        "num_layers": config.layers,
        **{theirs: getattr(config, ours) for theirs, ours in _SAME.items()},
        **{name: value for kind in kinds_in(config.pattern) for name, value in kind.exported_fields(config).items()},
        **multipliers(config),
        "dt_rank": config.dt_rank_or_default,
        "mamba_moe_layers": layer_list(config),
        "max_sequence_length": sequence_length,
        "initializer_range": config.init.std,
        "bias": False,
        "add_bias_linear": False,
        "swiglu": True,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **({"extensions": config.extensions} if config.extensions else {}),
    }


def multipliers(config: ModelConfig) -> dict[str, float]:
    """Return the factors that every model has."""
    factors = config.multipliers
    values = (factors.embedding, factors.residual, config.logits_divisor)
    return dict(zip(("embedding_multiplier", "residual_multiplier", "logits_scaling"), values, strict=True))


def function_of(config: ModelConfig) -> dict[str, Any]:
    """Return what decides the outputs of given weights, by our keys or the fields of config.json that have none.

    Values that follow from others are written out. Sizes that no layer reads are left out, and so is `expand`, which
    shapes tell.
    """
    unread = {theirs for theirs, ours in _SAME.items() if ours in unread_keys(config.pattern)}
    ignored = unread | {"initializer_range", "router_kind", "router_options", "dt_rank", "expansion_factor"}
    fields = {name: value for name, value in to_json(config, 0, torch.float32).items() if name not in ignored}
    derived = [item for kind in kinds_in(config.pattern) for item in kind.derived_fields(config).items()]
    fields |= {name: value for name, value in derived if fields.get(name, 0) is None}
    return {_SAME.get(name, name): value for name, value in fields.items()}


def read_config(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the ModelConfig of an export's config.json, and the whole content."""
    content = read_json(path)
    if content.get("model_type") != MODEL_TYPE:
        raise InterchangeError(f"{path}: model_type is {content.get('model_type')!r}, not {MODEL_TYPE!r}")
    fields = {ours: need(content, theirs, path) for theirs, ours in _SAME.items() if theirs in content}
    factors = {name.partition("_")[0]: content[name] for name in MULTIPLIERS if name in content}
    fields |= {"multipliers": factors, "dt_rank": content.get("dt_rank")}
    fields["tie_embeddings"] = content.get("tie_word_embeddings", True)
    fields["extensions"] = content.get("extensions", {})
    return model_config(fields, content, path, _SAME), content


def _canonical_names(entries: dict[str, Entry], folder: Path, tied: bool) -> dict[str, Entry]:
    """Drop the prefix, which older exports lack, and a copy of a tied output layer, which some tools write."""
    result = {name.removeprefix(PREFIX): entry for name, entry in entries.items()}
    twice = next((name for name in entries if not name.startswith(PREFIX) and PREFIX + name in entries), None)
    if twice is not None:
        raise InterchangeError(f"{folder}: has both {twice} and {PREFIX}{twice}. Remove the one that is out of date")
    head = result.pop(LM_HEAD, None)
    if not tied:
        if head is None:
            raise InterchangeError(f"{folder}: has no {LM_HEAD}, and tie_word_embeddings in config.json is false")
        result[HEAD] = head
    elif head is not None and not same_tensor(head, result.get("embedding.word_embeddings.weight")):
        raise InterchangeError(
            f"{folder}: {LM_HEAD} differs from the embedding, and tie_word_embeddings in config.json is true. "
            "Tie them with model.tie_weights() and save again"
        )
    return result


def write_tokenizer(model: Canonical, folder: Path) -> dict[str, int | None]:
    """Write tokenizer files that every transformers version loads; return the special ids for the configs."""
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        return dict.fromkeys(SPECIAL_IDS)
    tokenizer.save(folder / "tokenizer.json")
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.eod_token)
    bounded = any(
        kind.rotates(model.config) for kind in kinds_in(model.config.pattern)
    )  # a recurrence has no longest sequence
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": TOKENIZER_CLASS,
            **special,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            **({"model_max_length": model.sequence_length} if bounded else {}),
        },
    )
    write_json(folder / "special_tokens_map.json", special)
    return dict.fromkeys(SPECIAL_IDS, tokenizer.eod_id)
