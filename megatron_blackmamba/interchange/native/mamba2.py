"""transformers' Mamba-2."""

from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.native.base import Field, Uniform, heads_of_mamba2
from megatron_blackmamba.interchange.native.mamba import COMMON, FIXED, OURS, RECURRENT, WITHOUT_OUTPUT, same_names, ssm
from megatron_blackmamba.layers.mamba2.kind import Mamba2 as Layer
from megatron_blackmamba.layers.mamba2.kind import sizes

MIXER = (
    *("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight"),
    "out_proj.weight",
)
NO_LIMIT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], ["0.0", "inf"])
"""The ways in which transformers writes that time steps have no limit."""


def ssm2(model: ModelConfig) -> dict[str, int]:
    """Return the keys of a Mamba-2 in a GGUF file; its rank is the number of heads."""
    inner, heads, _ = sizes(model)
    state = {"state_size": model.mamba2.state_size, "group_count": model.mamba2.groups}
    return ssm(model, inner_size=inner, time_step_rank=heads, **state)


class Mamba2(Uniform):
    model_type, class_name, unit = "mamba2", "Mamba2ForCausalLM", Layer.letter
    fields = {
        **COMMON,
        "num_heads": Field("mamba2.heads", 128, write=heads_of_mamba2),
        "head_dim": Field("mamba2.head_dim", 64),
        "state_size": Field("mamba2.state_size", 128),
        "n_groups": Field("mamba2.groups", 8),
        "tie_word_embeddings": Field("tie_embeddings", False),
    }
    fixed = FIXED
    only = {"time_step_limit": NO_LIMIT}
    ours = OURS
    ignored = WITHOUT_OUTPUT | {"time_step_rank", "norm_before_gate"}
    layers, ends = "backbone.layers.{i}.", ("backbone.embeddings.weight", "backbone.norm_f.weight")
    names = {Layer.letter: same_names(MIXER)}
    renamed = {"backbone.embedding.": "backbone.embeddings."}

    def refused(self, model: ModelConfig) -> list[str]:
        inner = sizes(model)[0]
        if inner % model.hidden_size:
            return [f"model.mamba2.heads × head_dim = {inner}: set a multiple of model.hidden_size"]
        return []

    def more_exported(self, model: ModelConfig) -> dict[str, Any]:
        return {"expand": sizes(model)[0] // model.hidden_size}

    def in_llama_cpp(self, model: ModelConfig) -> dict[str, Any]:
        return {**RECURRENT, **ssm2(model)}
