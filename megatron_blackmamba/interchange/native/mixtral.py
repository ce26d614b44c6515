"""transformers' Mixtral."""

from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.native.base import Field
from megatron_blackmamba.interchange.native.llama import ATTENTION, ENDS, FIELDS, FIXED, OURS, Rotary
from megatron_blackmamba.layers.attention.kind import Attention
from megatron_blackmamba.layers.experts.kind import Experts

EXPERT = "block_sparse_moe.experts.{e}."


class Mixtral(Rotary):
    model_type, class_name, unit, theta = "mixtral", "MixtralForCausalLM", Attention.letter + Experts.letter, 10**6
    fields = {
        **FIELDS,
        "intermediate_size": Field("expert_hidden_size"),
        "rms_norm_eps": Field("norm_eps", 1e-5),
        "num_local_experts": Field("experts", 8),
        "num_experts_per_tok": Field("top_k", 2),
        "router_aux_loss_coef": Field("router.aux_loss", 0.001),
    }
    fixed = {**FIXED, "sliding_window": None, "router_jitter_noise": 0.0}
    ours = {**OURS, "router.kind": "softmax", "router.normalize": True, "router.bias": False}
    ignored = frozenset({"output_router_logits"})
    layers, ends = "model.layers.{i}.", ENDS
    names = {
        Attention.letter: ATTENTION,
        Experts.letter: {
            "norm.weight": "post_attention_layernorm.weight",
            "mixer.router.weight": "block_sparse_moe.gate.weight",
            "mixer.local_experts.{e}.linear_fc1.weight": (f"{EXPERT}w1.weight", f"{EXPERT}w3.weight"),
            "mixer.local_experts.{e}.linear_fc2.weight": f"{EXPERT}w2.weight",
        },
    }

    def in_llama_cpp(self, model: ModelConfig) -> dict[str, Any]:
        return {**super().in_llama_cpp(model), "expert_count": model.experts, "expert_used_count": model.top_k}
