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
ENDS = {"embeddings": "token_embd", "embed_tokens": "token_embd", "norm": "output_norm", "norm_f": "output_norm"}
ENDS |= {"lm_head": "output"}
IN_LAYER = {
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.x_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.gate_proj": "ffn_gate_exps",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.gate_proj": "ffn_gate_shexp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
"""llama.cpp's names of parts of a layer, by transformers' ones."""
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
    parts: dict[str, list[Entry]] = {}
    for name, entry in architecture.tensors_for_llama_cpp(model).items():
        theirs = named(name, architecture)
        parts.setdefault(theirs, []).append(_changed(theirs, entry, model.config, architecture.turns_neighbours))
    return {name: stacked(entries) if len(entries) > 1 else entries[0] for name, entries in parts.items()}


def named(name: str, architecture: Architecture) -> str:
    """Return llama.cpp's name for a name of transformers."""
    layer = re.fullmatch(re.escape(architecture.layers).replace(r"\{i\}", r"(\d+)") + "(.+)", name)
    if layer is None:
        return f"{ENDS[name.split('.')[-2]]}.weight"
    own = re.sub(r"experts\.\d+", "experts", layer[2])
    part, _, suffix = own.rpartition(".")
    return f"blk.{layer[1]}.{IN_LAYER[own] if own in IN_LAYER else f'{IN_LAYER[part]}.{suffix}'}"


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
