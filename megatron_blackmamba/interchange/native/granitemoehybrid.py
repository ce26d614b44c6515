"""transformers' Granite 4: in a layer Mamba-2 or attention, then experts with a shared one, or an MLP; multipliers."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import Canonical, Entry, InterchangeError
from megatron_blackmamba.interchange.json_config import layer_count, need, whole_number
from megatron_blackmamba.interchange.native.base import Field, heads_of_mamba2
from megatron_blackmamba.interchange.native.llama import ATTENTION, ENDS, FIELDS, FIXED, OURS, Rotary
from megatron_blackmamba.interchange.native.mamba2 import MIXER, NO_LIMIT, ssm2
from megatron_blackmamba.interchange.native.nemotron_h import TYPES, WITHOUT_ATTENTION
from megatron_blackmamba.layers.attention.kind import Attention, kv_heads
from megatron_blackmamba.layers.experts.kind import Experts
from megatron_blackmamba.layers.mamba2.kind import Mamba2, sizes
from megatron_blackmamba.layers.mlp.kind import MLP

MIXERS = (Mamba2.letter, Attention.letter)
NORM = {"norm.weight": "post_attention_layernorm.weight"}


def linear(ours: str, theirs: str, end: str = "") -> dict[str, str]:
    """Return the names of the two matrices of an MLP."""
    ends = (("linear_fc1", "input_linear"), ("linear_fc2", "output_linear"))
    return {f"mixer.{ours}{mine}.weight": f"{theirs}.{their}.weight{end}" for mine, their in ends}


class GraniteMoeHybrid(Rotary):
    model_type, class_name, per_layer = "granitemoehybrid", "GraniteMoeHybridForCausalLM", 2
    fields = {
        **FIELDS,
        "rms_norm_eps": Field("norm_eps", 1e-6),
        "intermediate_size": Field("expert_hidden_size"),
        "num_local_experts": Field("experts", 8),
        "num_experts_per_tok": Field("top_k", 2),
        "router_aux_loss_coef": Field("router.aux_loss", 0.001),
        "embedding_multiplier": Field("multipliers.embedding", 1.0),
        "residual_multiplier": Field("multipliers.residual", 1.0),
        "attention_multiplier": Field("multipliers.attention", 1.0, write=lambda model: model.attention_scale),
        "logits_scaling": Field("multipliers.logits", 1.0),
        "position_embedding_type": Field(
            "attention.rotary",
            None,
            lambda value: value == "rope",
            lambda model: "rope" if model.attention.rotary else "nope",
        ),
        "mamba_n_heads": Field("mamba2.heads", 128, write=heads_of_mamba2),
        "mamba_n_groups": Field("mamba2.groups", 1),
        "mamba_d_state": Field("mamba2.state_size", 256),
        "mamba_d_conv": Field("conv_kernel", 4),
    }
    fixed = {**FIXED, "attention_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False}
    only = {"time_step_limit": NO_LIMIT, "normalization_function": ("rmsnorm",)}
    ours = {**OURS, "router.kind": "softmax", "router.normalize": True, "router.bias": False}
    ignored = frozenset({"mamba_chunk_size", "output_router_logits", "init_method", "layers_block_type", "layer_types"})
    layers, ends = "model.layers.{i}.", ENDS
    names = {
        Mamba2.letter: {
            "norm.weight": "input_layernorm.weight",
            **{f"mixer.{name}": f"mamba.{name}" for name in MIXER},
        },
        Attention.letter: ATTENTION,
        MLP.letter: {**NORM, **linear("", "shared_mlp")},
        Experts.letter: {
            **NORM,
            "mixer.router.weight": "block_sparse_moe.router.layer.weight",
            **linear("local_experts.{e}.", "block_sparse_moe", "[{e}]"),
            **linear("shared_experts.", "shared_mlp"),
        },
    }

    def pattern(self, content: Mapping[str, Any], path: Path) -> str:
        name = "layers_block_type" if content.get("layers_block_type") else "layer_types"
        count = layer_count(need(dict(content), "num_hidden_layers", path), "num_hidden_layers", path)
        layers = content.get(name) or ["mamba"] * count
        known = {name: letter for name, letter in TYPES.items() if letter in MIXERS}
        if not isinstance(layers, list) or len(layers) != count:
            raise InterchangeError(f"{path}: num_hidden_layers is {count!r}, and {name} is {layers!r}")
        unknown = [layer for layer in layers if not isinstance(layer, str) or layer not in known]
        if unknown:
            raise InterchangeError(f"{path}: {name} has {unknown[0]!r}; a layer is one of {', '.join(known)}")
        second = Experts.letter if content.get("num_local_experts", 8) else MLP.letter
        return "".join(known[layer] + second for layer in layers)

    def counted(self, pattern: str) -> dict[str, Any] | None:
        mixers, second = pattern[::2], set(pattern[1::2])
        if not set(mixers) <= {*MIXERS} or len(pattern) % 2 or second not in ({Experts.letter}, {MLP.letter}):
            return None
        types = ["mamba" if letter == Mamba2.letter else "attention" for letter in mixers]
        return {"layer_types": types, "num_hidden_layers": len(mixers)}

    def advice(self) -> str:
        return f"alternate {' or '.join(MIXERS)} with {Experts.letter}, or with {MLP.letter}"

    def refused(self, model: ModelConfig) -> list[str]:
        found = []
        if Attention.letter not in model.pattern:
            found.append(f"model.pattern={model.pattern}: {WITHOUT_ATTENTION}")
        if Mamba2.letter in model.pattern and sizes(model)[0] % model.hidden_size:
            found.append(f"model.mamba2.heads × head_dim = {sizes(model)[0]}: set a multiple of model.hidden_size")
        if Experts.letter in model.pattern and model.shared_expert_hidden_size is None:
            found.append("model.shared_expert_hidden_size=null: set a size")
        return found

    def more_exported(self, model: ModelConfig) -> dict[str, Any]:
        dense = MLP.letter in model.pattern
        shared = model.mlp_hidden_size if dense else model.shared_expert_hidden_size
        keys: dict[str, Any] = {"shared_intermediate_size": shared}
        if dense:
            keys |= {"num_local_experts": 0, "intermediate_size": model.mlp_hidden_size}
        if Mamba2.letter in model.pattern:
            keys |= {"mamba_expand": sizes(model)[0] // model.hidden_size, "mamba_d_head": model.mamba2.head_dim}
        else:
            keys |= {"mamba_n_heads": 1, "mamba_d_head": "auto"}
        return {**keys, **(super().more_exported(model) if model.attention.rotary else {})}

    def more_imported(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        width, expand = need(content, "hidden_size", path), content.pop("mamba_expand", 2)
        size, heads = content.pop("mamba_d_head", "auto"), content.get("mamba_n_heads", 128)
        for name, value in (("hidden_size", width), ("mamba_expand", expand), ("mamba_n_heads", heads)):
            whole_number(value, name, path)
        shared = "shared_expert_hidden_size" if content.get("num_local_experts", 8) else "mlp_hidden_size"
        found = {**super().more_imported(content, path), shared: content.pop("shared_intermediate_size", 1024)}
        return {**found, "mamba2.head_dim": expand * width // heads if size == "auto" else size}

    def name_in_llama_cpp(self, model: ModelConfig) -> str:
        return "granitehybrid"

    def in_llama_cpp(self, model: ModelConfig) -> dict[str, Any]:
        factors = model.multipliers
        keys = {
            **super().in_llama_cpp(model),
            **ssm2(model),
            "head_count_kv": [kv_heads(model) if each == Attention.letter else 0 for each in model.pattern[::2]],
            "rope_scaling_finetuned": model.attention.rotary,  # there it says whether there are positions
            "attention_scale": model.attention_scale,
            "embedding_scale": factors.embedding,
            "residual_scale": factors.residual,
            "logit_scale": factors.logits,
        }
        if Experts.letter not in model.pattern:
            return keys
        experts = {"expert_count": model.experts, "expert_used_count": model.top_k}
        return {**keys, **experts, "expert_shared_feed_forward_length": model.shared_expert_hidden_size}

    def tensors_for_llama_cpp(self, model: Canonical) -> dict[str, Entry]:
        """Return the tensors under the names of other families, gate and up apart."""
        shared = "mlp.shared_experts" if Experts.letter in model.config.pattern else "mlp"
        names = {"shared_mlp": shared, "output_linear": "down_proj"}
        names |= {"block_sparse_moe.router.layer": "mlp.gate", "block_sparse_moe": "mlp.experts"}
        found: dict[str, Entry] = {}
        fused: dict[str, Entry] = {}

        @lru_cache(maxsize=1)  # the halves are read one after the other
        def whole(name: str) -> Tensor:
            return fused[name].load()

        for name, entry in self.in_file(model).items():
            for theirs, common in names.items():
                name = name.replace(theirs, common)
            if not name.endswith("input_linear.weight"):
                found[name] = entry
                continue
            fused[name], rows = entry, entry.shape[-2] // 2
            for i, half in enumerate(("gate_proj", "up_proj")):
                load = partial(lambda name, first, rows: whole(name).narrow(-2, first, rows), name, i * rows, rows)
                shape = (*entry.shape[:-2], rows, entry.shape[-1])
                found[name.replace("input_linear", half)] = replace(entry, shape=shape, load=load)
        return found

    def refused_by_llama_cpp(self, model: ModelConfig) -> list[str]:
        if Mamba2.letter not in model.pattern:
            return [f"model.pattern={model.pattern}: use {Mamba2.letter} too"]
        inner = sizes(model)[0]
        if inner == 2 * model.hidden_size:
            return []
        return [f"model.mamba2.heads × head_dim = {inner}: set 2 × model.hidden_size"]
