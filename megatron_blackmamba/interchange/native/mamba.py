"""transformers' Mamba, as in the state-spaces/mamba-*-hf models."""

from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.native.base import Field, Uniform
from megatron_blackmamba.layers.mamba.kind import Mamba as Layer

MIXER = (
    *("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias"),
    *("A_log", "D", "out_proj.weight"),
)
FIXED = {"hidden_act": "silu", "use_bias": False, "use_conv_bias": True}
COMMON = {
    "vocab_size": Field("vocab_size"),
    "hidden_size": Field("hidden_size"),
    "conv_kernel": Field("conv_kernel", 4),
    "expand": Field("expand", 2),
    "layer_norm_epsilon": Field("norm_eps", 1e-5),
}
OURS = {"final_norm": "rms"}
WITHOUT_OUTPUT = frozenset(
    {
        *("intermediate_size", "time_step_scale", "time_step_init_scheme", "use_mambapy", "use_associative_scan"),
        *("d_inner", "d_model", "n_layer", "ssm_cfg", "rms_norm", "fused_add_norm", "pad_vocab_size_multiple"),
    }
)
"""Keys that follow from others, or say how to begin or compute."""
RECURRENT = {"feed_forward_length": 0, "head_count": 0}
"""Keys that llama.cpp requires and does not use."""


def same_names(mixer: tuple[str, ...]) -> dict[str, str]:
    """Return the names of a layer whose mixer has the same ones there and here."""
    return {name: name for name in ("norm.weight", *(f"mixer.{each}" for each in mixer))}


def ssm(model: ModelConfig, **sizes: int) -> dict[str, int]:
    """Return the keys of a recurrence in a GGUF file."""
    return {"ssm_conv_kernel": model.conv_kernel, **{f"ssm_{name}": size for name, size in sizes.items()}}


class Mamba(Uniform):
    model_type, class_name, unit = "mamba", "MambaForCausalLM", Layer.letter
    fields = {
        **COMMON,
        "state_size": Field("state_size", 16),
        "time_step_rank": Field(
            "dt_rank", "auto", lambda value: None if value == "auto" else value, lambda model: model.dt_rank_or_default
        ),
        "tie_word_embeddings": Field("tie_embeddings", True),
    }
    fixed = FIXED
    ours = OURS
    ignored = WITHOUT_OUTPUT
    layers, ends = "backbone.layers.{i}.", ("backbone.embeddings.weight", "backbone.norm_f.weight")
    names = {Layer.letter: same_names(MIXER)}
    renamed = {"backbone.embedding.": "backbone.embeddings."}

    def more_exported(self, model: ModelConfig) -> dict[str, Any]:
        return {"intermediate_size": model.inner_size}

    def in_llama_cpp(self, model: ModelConfig) -> dict[str, Any]:
        sizes = {"inner_size": model.inner_size, "state_size": model.state_size}
        return {**RECURRENT, **ssm(model, **sizes, time_step_rank=model.dt_rank_or_default)}

    def refused_by_llama_cpp(self, model: ModelConfig) -> list[str]:
        return [] if model.expand == 2 else [f"model.expand={model.expand}: set 2"]
