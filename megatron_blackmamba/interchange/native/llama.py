"""transformers' Llama, and what Llama and Mixtral have in common."""

from pathlib import Path
from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.native.base import Field, Names, Uniform
from megatron_blackmamba.layers.attention.kind import Attention, head_dim, kv_heads
from megatron_blackmamba.layers.mlp.kind import MLP

FIELDS = {
    "vocab_size": Field("vocab_size"),
    "hidden_size": Field("hidden_size"),
    "num_attention_heads": Field("attention.heads"),
    "num_key_value_heads": Field("attention.kv_heads", None, write=kv_heads),
    "head_dim": Field("attention.head_dim", None, write=head_dim),
    "tie_word_embeddings": Field("tie_embeddings", False),
}
FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}
OURS = {"final_norm": "rms"}
ENDS = ("model.embed_tokens.weight", "model.norm.weight")
ATTENTION: dict[str, Names] = {
    "norm.weight": "input_layernorm.weight",
    "mixer.linear_qkv.weight": tuple(f"self_attn.{each}_proj.weight" for each in "qkv"),
    "mixer.linear_proj.weight": "self_attn.o_proj.weight",
}


def heads(model: ModelConfig) -> dict[str, int]:
    """Return the keys of attention in a GGUF file."""
    size = head_dim(model)
    return {"head_count": model.attention.heads, "key_length": size, "value_length": size}


class Rotary(Uniform):
    """A family with rotary positions of one base."""

    theta: int = 10000
    turns_neighbours = True

    def more_exported(self, model: ModelConfig) -> dict[str, Any]:
        return {"rope_theta": float(model.attention.rotary_base)}

    def more_imported(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        rope, scaling = (content.pop(name, None) or {} for name in ("rope_parameters", "rope_scaling"))
        if not isinstance(rope, dict) or not isinstance(scaling, dict):
            raise InterchangeError(f"{path}: rope_parameters or rope_scaling is not an object")
        rope = dict(rope)
        theta: Any = content.pop("rope_theta", None) or rope.pop("rope_theta", None) or self.theta
        rope.pop("rope_theta", None)
        for value in (rope, scaling):
            if any(value[key] not in (None, "default", 1.0) for key in value):
                raise InterchangeError(
                    f"{path}: rope_parameters or rope_scaling is {value}; only plain rotary positions convert"
                )
        if not isinstance(theta, (int, float)) or not (isinstance(theta, int) or theta.is_integer()):
            raise InterchangeError(f"{path}: rope_theta is {theta!r}; only whole numbers convert")
        return {"attention.rotary_base": int(theta)}

    def name_in_llama_cpp(self, model: ModelConfig) -> str:
        return "llama"

    def in_llama_cpp(self, model: ModelConfig) -> dict[str, Any]:
        return {
            **heads(model),
            "head_count_kv": kv_heads(model),
            "rope_dimension_count": head_dim(model),
            "rope_freq_base": float(model.attention.rotary_base),
            "feed_forward_length": model.mlp_hidden_size or model.expert_hidden_size,
        }


class Llama(Rotary):
    model_type, class_name, unit = "llama", "LlamaForCausalLM", Attention.letter + MLP.letter
    fields = {**FIELDS, "intermediate_size": Field("mlp_hidden_size"), "rms_norm_eps": Field("norm_eps", 1e-6)}
    fixed = {**FIXED, "attention_bias": False, "mlp_bias": False}
    only = {"pretraining_tp": (1,)}
    ours = OURS
    layers, ends = "model.layers.{i}.", ENDS
    names = {
        Attention.letter: ATTENTION,
        MLP.letter: {
            "norm.weight": "post_attention_layernorm.weight",
            "mixer.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "mixer.linear_fc2.weight": "mlp.down_proj.weight",
        },
    }
