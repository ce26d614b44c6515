"""GGUF files, as llama.cpp and Ollama load them: the tensors of a native model under llama.cpp's names."""

import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import Canonical, Entry, InterchangeError, tokenizer_of
from megatron_blackmamba.interchange.native import architecture_of
from megatron_blackmamba.interchange.native.base import UNBOUNDED, Architecture, positions, stacked
from megatron_blackmamba.interchange.native.llama_cpp_tokens import Vocabulary, vocabulary
from megatron_blackmamba.layers.attention.kind import kv_heads
from megatron_blackmamba.layers.mamba2.kind import Mamba2

if TYPE_CHECKING:
    import numpy as np

Precision = Literal["f32", "f16", "bf16", "q8_0"]
"""Types of the large matrices."""
SPELLED = {
    r"\.experts\.\d+\.": ".experts.",
    r"^backbone\.(.*)mixer\.experts": r"model.\1mlp.experts",
    r"dt_bias$": "dt_proj.bias",
    r"correction_bias$": "correction.bias",
}
"""Parts of transformers' names, and how the names are spelled that the package gguf knows."""
Q8_0_BLOCK = 32
KEPT_IN_FP32 = re.compile(r"(_norm|ssm_conv1d|ffn_gate_inp)\.weight$|\.bias$|\.ssm_[ad]$")
"""Tensors that llama.cpp's own converter never rounds."""


def vocabulary_of(model: Canonical) -> Vocabulary:
    """Return the vocabulary of a model for llama.cpp; refuse a model or a tokenizer that it does not run."""
    obstacles = architecture_of(model.config, model.source).refused_by_llama_cpp(model.config)
    if obstacles:
        raise InterchangeError(f"{model.source}: llama.cpp does not run it: {'; '.join(obstacles)}")
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise InterchangeError(
            f"{model.source}: has no tokenizer, which a GGUF file contains. Name one with --tokenizer"
        )
    return vocabulary(tokenizer, model.config.vocab_size)


def write(model: Canonical, path: Path, precision: Precision, name: str) -> None:
    """Write one GGUF file, a tensor at a time; programs show the model under `name`."""
    gguf, words, config = library(), vocabulary_of(model), model.config
    architecture = architecture_of(config, model.source)
    writer = gguf.GGUFWriter(path, architecture.name_in_llama_cpp(config))
    file_type = "ALL_F32" if precision == "f32" else f"MOSTLY_{precision.upper()}"
    keys: dict[str, Any] = {
        "type": gguf.GGUFType.MODEL,
        "name": name,
        "file_type": gguf.LlamaFileType[file_type],
        "quantization_version": gguf.GGML_QUANT_VERSION,
        "context_length": positions(model) or UNBOUNDED,
        "embedding_length": config.hidden_size,
        "block_count": config.layers // architecture.per_layer,
        "vocab_size": config.vocab_size,
        "layer_norm_rms_eps": config.norm_eps,
        **({} if model.license == "unknown" else {"license": model.license}),
        **architecture.in_llama_cpp(config),
        **words.keys(),
    }
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    held = tensors(model, architecture)
    types = {tensor: _type(tensor, entry.shape, precision) for tensor, entry in held.items()}
    for tensor, entry in held.items():
        width = gguf.quant_shape_to_byte_shape(entry.shape, types[tensor])
        writer.add_tensor_info(tensor, entry.shape, None, math.prod(width), raw_dtype=types[tensor])
    sums = {}
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, entry in held.items():
            data = _rounded(entry.load(), types[tensor], f"{model.source}: {tensor}")
            sums[tensor] = zlib.crc32(data.data)
            writer.write_tensor_data(data)
    finally:
        writer.close()
    if {tensor.name: zlib.crc32(tensor.data.data) for tensor in gguf.GGUFReader(path).tensors} != sums:
        raise InterchangeError(f"{path}: differs from what was written. Check the disk, then try again")


def tensors(model: Canonical, architecture: Architecture) -> dict[str, Entry]:
    """Return the tensors of the file; all experts of a layer are one tensor."""
    gguf, parts = library(), dict[str, list[Entry]]()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture.name_in_llama_cpp(model.config)], model.config.layers)
    for name, entry in architecture.tensors_for_llama_cpp(model).items():
        theirs = named(name, names)
        parts.setdefault(theirs, []).append(_changed(theirs, entry, model.config, architecture.turns_neighbours))
    return {name: stacked(entries) if len(entries) > 1 else entries[0] for name, entries in parts.items()}


def named(name: str, names: Any) -> str:
    """Return llama.cpp's name for a name of transformers, out of gguf's names of a family."""
    for part, spelled in SPELLED.items():
        name = re.sub(part, spelled, name)
    found: str = names.get_name(name, try_suffixes=(".weight", ".bias"))
    return found


def _changed(name: str, entry: Entry, model: ModelConfig, neighbours: bool) -> Entry:
    """Return a tensor in llama.cpp's form: decays for their logarithms, other shapes, other pairs of channels."""
    part = name.split(".")[-2 if name.endswith((".weight", ".bias")) else -1]

    def change(tensor: Tensor) -> Tensor:
        if part == "ssm_a":
            tensor = -tensor.float().exp()
        if part in ("ssm_a", "ssm_d") and Mamba2.letter in model.pattern:
            return tensor[:, None]
        if part == "ssm_conv1d" and tensor.ndim == 3:
            return tensor[:, 0]
        if part == "ssm_norm":
            return tensor.view(model.mamba2.groups, -1)
        if part in ("attn_q", "attn_k") and neighbours:  # a head's channels turn in pairs of neighbours there
            heads = model.attention.heads if part == "attn_q" else kv_heads(model)
            return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return tensor

    shape = change(torch.empty(entry.shape, device="meta")).shape
    return Entry(tuple(shape), entry.dtype, lambda: change(entry.load()))


def _type(name: str, shape: Sequence[int], precision: Precision) -> Any:
    """Return the type of a tensor in the file; rows that are no whole blocks of q8_0 are f16."""
    types = library().GGMLQuantizationType
    if len(shape) == 1 or KEPT_IN_FP32.search(name):
        return types.F32
    return types.F16 if precision == "q8_0" and shape[-1] % Q8_0_BLOCK else types[precision.upper()]


def _rounded(tensor: Tensor, to: Any, name: str) -> "np.ndarray":
    import numpy as np

    with np.errstate(over="ignore"):
        found = library().quantize(tensor.float().numpy(), to)
    if found.dtype == np.float16 and not np.isfinite(found).all():
        raise InterchangeError(f"{name}: holds values that f16 cannot. Use --type bf16 or f32")
    return np.ascontiguousarray(found)


def library() -> Any:
    """Return the package gguf."""
    try:
        import gguf
    except ImportError:
        raise InterchangeError("gguf, which writes these files, is not installed: pip install -e '.[gguf]'") from None
    return gguf
