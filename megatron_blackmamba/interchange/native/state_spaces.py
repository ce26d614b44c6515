"""The original files of state-spaces/mamba (mamba-130m to mamba-2.8b and mamba2-*), read as transformers' models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.interchange.json_config import need, whole_number

SSM = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand"}
OF_LAYER: Mapping[str, Mapping[str, str]] = {
    "Mamba1": {**SSM, "dt_rank": "time_step_rank"},
    "Mamba2": {**SSM, "headdim": "head_dim", "ngroups": "n_groups"},
}
WITHOUT_EFFECT = {"layer", "chunk_size", "use_mem_eff_path", "use_fast_path", "dt_min", "dt_max", "dt_init_floor"}
KNOWN = {"d_model", "n_layer", "vocab_size", "ssm_cfg", "residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple"}
ONLY = {"rms_norm": True, "d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}}


def is_one(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of the original files."""
    return "model_type" not in content and "d_model" in content


def translated(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the config.json that transformers has for the same model."""
    for name, value in content.items():
        if name in ONLY and value != ONLY[name]:
            raise InterchangeError(f"{path}: {name} is {value!r}; only {ONLY[name]!r} converts")
        if name not in (*KNOWN, *ONLY, "tie_embeddings"):
            raise InterchangeError(f"{path}: {name} is {value!r}, which import does not know for state-spaces/mamba")
    ssm = content.get("ssm_cfg") or {}
    if not isinstance(ssm, dict):
        raise InterchangeError(f"{path}: ssm_cfg is {ssm!r}, not an object")
    layer = ssm.get("layer", "Mamba1")
    if not isinstance(layer, str) or layer not in OF_LAYER:
        raise InterchangeError(f"{path}: ssm_cfg.layer is {layer!r}; only {' and '.join(OF_LAYER)} convert")
    fields = {"hidden_size": "d_model", "num_hidden_layers": "n_layer"}
    found = {ours: need(dict(content), theirs, path) for ours, theirs in fields.items()}
    for name, value in ssm.items():
        if name in OF_LAYER[layer]:
            found[OF_LAYER[layer][name]] = value
        elif name not in WITHOUT_EFFECT:
            raise InterchangeError(f"{path}: ssm_cfg.{name} is {value!r}, which import does not know for {layer}")
    vocabulary, multiple = need(dict(content), "vocab_size", path), content.get("pad_vocab_size_multiple", 8)
    for name, value in (("vocab_size", vocabulary), ("pad_vocab_size_multiple", multiple)):
        whole_number(value, name, path)
    found["vocab_size"] = -(-vocabulary // multiple) * multiple
    found["tie_word_embeddings"] = content.get("tie_embeddings", True)
    if layer == "Mamba2":
        found = {"head_dim": 64, "n_groups": 1, "expand": 2, **found}
        for name in ("expand", "hidden_size", "head_dim"):
            whole_number(found[name], name, path)
        found["num_heads"] = found["expand"] * found["hidden_size"] // found["head_dim"]
    return {"model_type": layer.lower().replace("1", ""), **found}
