"""transformers' Mamba-2."""

from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.native.base import Field, Uniform, heads_of_mamba2
from megatron_blackmamba.interchange.native.mamba import COMMON, FIXED, OURS, same_names
from megatron_blackmamba.kinds.mamba2 import Mamba2 as Layer

MIXER = (
    *("in_proj.weight", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight"),
    "out_proj.weight",
)
NO_LIMIT = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], ["0.0", "inf"])
"""The ways in which transformers writes that time steps have no limit."""


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
    ignored = frozenset({"time_step_rank", "norm_before_gate", "rms_norm"})
    layers, ends = "backbone.layers.{i}.", ("backbone.embeddings.weight", "backbone.norm_f.weight")
    names = {Layer.letter: same_names(MIXER)}
    renamed = {"backbone.embedding.": "backbone.embeddings."}

    def refused(self, model: ModelConfig) -> list[str]:
        inner = heads_of_mamba2(model) * model.mamba2.head_dim
        if inner % model.hidden_size:
            return [f"model.mamba2.heads × head_dim = {inner}: set a multiple of model.hidden_size"]
        return []

    def more_exported(self, model: ModelConfig) -> dict[str, Any]:
        return {"expand": heads_of_mamba2(model) * model.mamba2.head_dim // model.hidden_size}
