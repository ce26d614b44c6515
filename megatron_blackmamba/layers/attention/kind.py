"""Causal self-attention, with rotary positions as in the paper's transformer baselines or without any.

Shapes: B batch, L new tokens, S all tokens so far, D model, H heads, G key-value heads, C channels of a head,
Q = (H + 2G) C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.layers.base import Division, LayerKind
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows, whole

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
"""With model.attention.qk_norm: one weight for a channel of a head, which all heads share."""


class Attention(LayerKind):
    letter, name = "*", "attention"
    keys = ("attention", "multipliers.attention", "mup.base_heads")
    mixer = "megatron_blackmamba.layers.attention.mixer:AttentionMixer"
    cost = "megatron_blackmamba.layers.attention.cost:AttentionCost"
    decode = "megatron_blackmamba.layers.attention.decode:AttentionDecoding"
    rotary = True
    cut = None
    widens = True
    writes_to_residual = ("linear_proj.weight",)
    part, entry = "attention", "attention"

    def problems(self, model: ModelConfig) -> list[str]:
        width, heads, groups = model.hidden_size, model.attention.heads, kv_heads(model)
        found, given, odd = [], model.attention.head_dim, self.rotates(model) and head_dim(model) % 2
        if given is None and width % heads:
            found.append(
                f"model.hidden_size={width} is not divisible by model.attention.heads={heads}: set"
                " model.attention.head_dim"
            )
        elif given is not None and odd:
            found.append(f"model.attention.head_dim={given}: rotary positions need an even number")
        elif odd:
            found.append(
                f"model.attention.heads={heads} leaves {width // heads} channels a head of model.hidden_size={width}:"
                " rotary positions need an even number"
            )
        if heads % groups:
            found.append(f"model.attention.heads={heads} is not divisible by model.attention.kv_heads={groups}")
        return found

    def rotates(self, model: ModelConfig) -> bool:
        return model.attention.rotary

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "num_attention_heads": model.attention.heads,
            "kv_channels": head_dim(model),
            "num_query_groups": model.attention.kv_heads,
            "qk_layernorm": model.attention.qk_norm,  # 0.19 refuses norms in the spec without it
        }

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [
            Division("model.attention.heads", model.attention.heads, "tensor"),
            Division("model.attention.kv_heads", kv_heads(model), "tensor"),
        ]

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        D, C, groups, queries = model.hidden_size, head_dim(model), kv_heads(model), query_rows(model)
        return {
            "linear_qkv.weight": replace(by_rows(D, q=queries // groups, k=C, v=C), groups=groups),
            "linear_proj.weight": by_columns(queries, out=D),
            **(dict.fromkeys(QK_NORMS, whole(channels=C)) if model.attention.qk_norm else {}),
        }

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        attention = model.attention
        return {
            "num_attention_heads": attention.heads,
            "num_key_value_heads": kv_heads(model),
            "head_dim": attention.head_dim,
            "rotary": attention.rotary,
            "rope_theta": attention.rotary_base,
            "attention_multiplier": model.attention_scale,
            "qk_norm": attention.qk_norm,
            "attention_across_documents": attention.across_documents,
        }

    def derived_fields(self, model: ModelConfig) -> dict[str, Any]:
        return {"head_dim": head_dim(model), "attention_multiplier": head_dim(model) ** -0.5}

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        names = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "rotary_base": "rope_theta"}
        names |= {key: key for key in ("qk_norm", "head_dim", "rotary")}
        found = {ours: content[theirs] for ours, theirs in names.items() if theirs in content}
        return {"attention": {**found, "across_documents": content.get("attention_across_documents", True)}}


def kv_heads(model: ModelConfig) -> int:
    """Return G."""
    return model.attention.kv_heads or model.attention.heads


def head_dim(model: ModelConfig) -> int:
    """Return C."""
    return model.attention.head_dim or model.hidden_size // model.attention.heads


def query_rows(model: ModelConfig) -> int:
    """Return the width of the queries."""
    return head_dim(model) * model.attention.heads


def key_value_rows(model: ModelConfig) -> int:
    """Return the width of the keys, and of the values."""
    return head_dim(model) * kv_heads(model)
