"""transformers' Nemotron-H: Mamba-2, attention without positions, and MLPs and experts with a squared ReLU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.json_config import layer_count
from megatron_blackmamba.interchange.native.base import Architecture, Field, heads_of_mamba2
from megatron_blackmamba.interchange.native.llama import heads
from megatron_blackmamba.interchange.native.mamba import same_names
from megatron_blackmamba.interchange.native.mamba2 import MIXER, NO_LIMIT, ssm2
from megatron_blackmamba.layers.attention.kind import Attention, head_dim, kv_heads
from megatron_blackmamba.layers.experts.kind import Experts
from megatron_blackmamba.layers.mamba2.kind import Mamba2
from megatron_blackmamba.layers.mlp.kind import MLP

LETTERS = dict(zip("M*-E", (kind.letter for kind in (Mamba2, Attention, MLP, Experts)), strict=True))
"""Ours by theirs."""
TYPES = {
    **dict.fromkeys(("linear_attention", "mamba"), Mamba2.letter),
    **dict.fromkeys(("full_attention", "attention"), Attention.letter),
    "mlp": MLP.letter,
    "moe": Experts.letter,
}
"""Ours by the types of layers_block_type."""
EXTRA_KEYS = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
EXTRA_LAYERS = f"{Attention.letter}{Experts.letter}"
"""Those of an extra depth without one of these keys, as transformers has it."""
WITHOUT_ATTENTION = "transformers 5.24 writes no text without an attention layer"
NO_BOUND = 1e-30
"""A lower bound of time steps that bounds none; transformers takes the logarithm of it, so 0 is not allowed."""
LINEAR = {"mixer.linear_fc1.weight": "mixer.up_proj.weight", "mixer.linear_fc2.weight": "mixer.down_proj.weight"}


OF_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_", "routed_scaling_factor")
"""Starts of the keys that only expert layers read."""


class NemotronH(Architecture):
    model_type, class_name = "nemotron_h", "NemotronHForCausalLM"
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("hidden_size"),
        "layer_norm_epsilon": Field("norm_eps", 1e-5),
        "conv_kernel": Field("conv_kernel", 4),
        "mamba_num_heads": Field("mamba2.heads", 128, write=heads_of_mamba2),
        "mamba_head_dim": Field("mamba2.head_dim", 64),
        "ssm_state_size": Field("mamba2.state_size", 128),
        "time_step_min": Field(
            "mamba2.time_step_min",
            0.001,
            lambda value: 0.0 if value <= NO_BOUND else value,
            lambda model: model.mamba2.time_step_min or NO_BOUND,
        ),
        "n_groups": Field("mamba2.groups", 8),
        "num_attention_heads": Field("attention.heads", 32),
        "num_key_value_heads": Field("attention.kv_heads", 8, write=kv_heads),
        "head_dim": Field("attention.head_dim", 128, write=head_dim),
        "intermediate_size": Field("mlp_hidden_size", 21504),
        "n_routed_experts": Field("experts", 8),
        "num_experts_per_tok": Field("top_k", 2),
        "moe_intermediate_size": Field("expert_hidden_size", 7688),
        "moe_shared_expert_intermediate_size": Field("shared_expert_hidden_size", 7688),
        "moe_latent_size": Field("latent_size", None),
        "routed_scaling_factor": Field("router.scale", 1.0),
    }
    fixed = {
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    only = {"time_step_limit": NO_LIMIT}
    ours = {
        "activation": "relu2",
        "gated": False,
        "final_norm": "rms",
        "tie_embeddings": False,
        "attention.rotary": False,
        "router.kind": "expert_bias",
        "router.bias": False,
    }
    ignored = frozenset(
        {
            *("layers_block_type", "layer_types", "hybrid_override_pattern", "expand", *EXTRA_KEYS),
            *("num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
            *("moe_shared_expert_overlap", "output_router_logits", "rope_theta", "partial_rotary_factor"),
            *("attention_head_dim", "time_step_rank", "norm_eps", "router_dtype", "num_nextn_predict_layers"),
        }
    )
    layers, ends = "backbone.layers.{i}.", ("backbone.embeddings.weight", "backbone.norm_f.weight")
    names = {
        Mamba2.letter: same_names(MIXER),
        Attention.letter: {
            "norm.weight": "norm.weight",
            "mixer.linear_qkv.weight": tuple(f"mixer.{each}_proj.weight" for each in "qkv"),
            "mixer.linear_proj.weight": "mixer.o_proj.weight",
        },
        MLP.letter: {"norm.weight": "norm.weight", **LINEAR},
        Experts.letter: {
            "norm.weight": "norm.weight",
            "mixer.router.weight": "mixer.gate.weight",
            "mixer.router.expert_bias": "mixer.gate.e_score_correction_bias",
            "mixer.latent_down.weight": "mixer.fc1_latent_proj.weight",
            "mixer.latent_up.weight": "mixer.fc2_latent_proj.weight",
            **{
                ours.replace("mixer.", f"mixer.{held}."): theirs.replace("mixer.", f"mixer.{there}.")
                for held, there in (("local_experts.{e}", "experts.{e}"), ("shared_experts", "shared_experts"))
                for ours, theirs in LINEAR.items()
            },
        },
    }
    renamed = {"model.mtp.": "mtp.", "model.": "backbone."}
    extra = "mtp."
    extra_names = {
        "embedding_norm.weight": "layers.0.enorm.weight",
        "hidden_norm.weight": "layers.0.hnorm.weight",
        "proj.weight": "layers.0.eh_proj.weight",
        "final_norm.weight": "layers.{last}.final_layernorm.weight",
    }

    def pattern(self, content: Mapping[str, Any], path: Path) -> str:
        name = next(
            (key for key in ("layers_block_type", "layer_types", "hybrid_override_pattern") if content.get(key)), None
        )
        if name is None:
            raise InterchangeError(f"{path}: has no field 'hybrid_override_pattern', nor 'layers_block_type'")
        layers, count = content[name], content.get("num_hidden_layers")
        if not isinstance(layers, (str, list)) or count not in (None, len(layers)):
            raise InterchangeError(f"{path}: num_hidden_layers is {count!r}, and {name} is {layers!r}")
        layer_count(len(layers), f"the length of {name}", path)
        return _ours(layers, name, path)

    def counted(self, pattern: str) -> dict[str, Any] | None:
        theirs = _theirs(pattern)
        return None if theirs is None else {"hybrid_override_pattern": theirs, "num_hidden_layers": len(pattern)}

    def exported(self, model: ModelConfig) -> dict[str, Any]:
        """Leave out the keys of experts in a model without any: tools tell by them whether it has some."""
        found = super().exported(model)
        if Experts.letter in model.pattern:
            return found
        return {key: value for key, value in found.items() if not key.startswith(OF_EXPERTS)}

    def more_exported(self, model: ModelConfig) -> dict[str, Any]:
        if not model.mtp.pattern:
            return {"num_nextn_predict_layers": 0}
        return {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": _theirs(model.mtp.pattern)}

    def more_imported(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return the keys of the extra depth; refuse one that ours cannot be."""
        depths, advice = content.get("num_nextn_predict_layers"), "Set num_nextn_predict_layers to 0 to leave it out"
        if not depths:
            return {}
        if depths != 1:
            raise InterchangeError(f"{path}: num_nextn_predict_layers is {depths!r}; import reads one depth. {advice}")
        said = {name: layers for name in EXTRA_KEYS if (layers := content.get(name))}
        patterns = {_ours(layers, name, path) for name, layers in said.items()} or {EXTRA_LAYERS}
        if len(patterns) > 1:
            raise InterchangeError(f"{path}: {' and '.join(said)} differ. Remove the wrong one")
        (ahead,) = patterns
        missing = set(ahead) - set(self.pattern(content, path))
        if missing:
            raise InterchangeError(
                f"{path}: the multi-token prediction has a layer {_theirs(min(missing))!r}, which the model itself has"
                f" not. {advice}"
            )
        return {"mtp.pattern": ahead, "mtp.reads": "norm"}

    def imported(self, content: Mapping[str, Any], path: Path) -> ModelConfig:
        if "attention_head_dim" in content:  # the name of head_dim in NVIDIA's older code
            content = {"head_dim": content["attention_head_dim"], **content}
            if content["head_dim"] != content["attention_head_dim"]:
                raise InterchangeError(f"{path}: head_dim and attention_head_dim differ. Remove the wrong one")
        model = super().imported(content, path)
        if Experts.letter in model.pattern and model.top_k == 1:
            raise InterchangeError(
                f"{path}: num_experts_per_tok is 1; transformers then gives every expert the weight 1, which no router"
                " here does. Only 2 or more converts"
            )
        return model

    def refused(self, model: ModelConfig) -> list[str]:
        found = []
        if Attention.letter not in model.pattern:
            found.append(f"model.pattern={model.pattern}: {WITHOUT_ATTENTION}")
        if Experts.letter not in model.pattern:
            return found
        if model.top_k == 1:
            found.append("model.top_k=1: set 2 or more")
        if model.shared_expert_hidden_size is None:
            found.append("model.shared_expert_hidden_size=null: set a size")
        return found

    def name_in_llama_cpp(self, model: ModelConfig) -> str:
        return "nemotron_h_moe" if Experts.letter in model.pattern else "nemotron_h"

    def in_llama_cpp(self, model: ModelConfig) -> dict[str, Any]:
        hidden = {MLP.letter: model.mlp_hidden_size, Experts.letter: model.expert_hidden_size}
        keys = {
            **ssm2(model),
            **heads(model),
            "head_count_kv": [kv_heads(model) if each == Attention.letter else 0 for each in model.pattern],
            "feed_forward_length": [hidden.get(each, 0) for each in model.pattern],
            "layer_norm_eps": model.norm_eps,
        }
        if Experts.letter not in model.pattern:
            return keys
        latent = {"moe_latent_size": model.latent_size} if model.latent_size else {}
        return {
            **keys,
            **latent,
            "expert_count": model.experts,
            "expert_used_count": model.top_k,
            "expert_feed_forward_length": model.expert_hidden_size,
            "expert_shared_feed_forward_length": model.shared_expert_hidden_size,
            "expert_shared_count": 1,
            "expert_group_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": model.router.scale,
        }

    def refused_by_llama_cpp(self, model: ModelConfig) -> list[str]:
        found = []
        if {MLP.letter, Experts.letter} <= set(model.pattern):
            found.append(f"model.pattern={model.pattern}: use {MLP.letter} or {Experts.letter}, not both")
        if model.mamba2.time_step_min:
            found.append(f"model.mamba2.time_step_min={model.mamba2.time_step_min}: only 0 runs there")
        return found


def _ours(layers: Any, name: str, path: Path) -> str:
    """Return our letters for the layers that a key lists, or spells as a pattern."""
    known = LETTERS if name.endswith("hybrid_override_pattern") else TYPES
    for layer in layers if isinstance(layers, (str, list)) else [layers]:
        if not isinstance(layer, str) or layer not in known:
            raise InterchangeError(f"{path}: {name} has {layer!r}; a layer is one of {', '.join(known)}")
    return "".join(known[layer] for layer in layers)


def _theirs(pattern: str) -> str | None:
    """Return their letters for ours; None: they have no such layers."""
    theirs = {ours: letter for letter, ours in LETTERS.items()}
    return "".join(theirs[each] for each in pattern) if set(pattern) <= theirs.keys() else None
