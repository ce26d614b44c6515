"""Tiny checkpoints in the released form, every parameter moved off the value that a fresh model would start with."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# What a fresh model has where it is not random: a weight left there could be forgotten without a test noticing.
_CENTRE = {"norm.weight": 1.0, "final_layernorm.weight": 1.0, "mixer.D": 1.0, "dt_proj.bias": -2.0, "dt_bias": -2.0}


@dataclass(frozen=True)
class Tiny:
    """A released checkpoint in memory: its config.json, and its state dict by the released names."""

    config: dict[str, Any]
    weights: dict[str, Tensor]

    def with_config(self, **changes: Any) -> "Tiny":
        return replace(self, config={**self.config, **changes})

    def with_weights(self, **changes: Tensor) -> "Tiny":
        return replace(self, weights={**self.weights, **changes})


def tiny(
    activation: str = "silu",
    *,
    layers: str = "r4r4",
    hidden: int = 32,
    ffn: int = 48,
    state: int = 8,
    vocab: int = 64,
    eod_reset: int | None = None,
    arrangement: str = "sequential",
    seed: int = 0,
    **router: Any,
) -> Tiny:
    """Return a tiny checkpoint.

    Args:
        layers: One character per layer: r for Mamba, a digit for that many experts (both as in the released config), a
            for attention, m for a dense MLP, s for Mamba-2, t for Mamba-3, d for the delta rule.
        router: Fields of config.json for other routers.
    """
    config = {
        "num_layers": len(layers),
        "hidden_size": hidden,
        "state_size": state,
        "conv_dimension": 4,
        "vocab_size": vocab,
        "expansion_factor": 2,
        "mamba_moe_layers": [
            {"a": "attention", "m": "mlp", "s": "mamba2", "t": "mamba3", "d": "delta"}.get(layer, layer)
            for layer in layers
        ],
        "ffn_hidden_size": ffn,
        "bias": False,
        "add_bias_linear": False,
        "swiglu": True,
        "max_sequence_length": 2048,
        "activation": activation,
        "eod_reset": eod_reset,
    }
    if arrangement != "sequential":
        config["arrangement"] = arrangement
    if "a" in layers:
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 100}
    if "m" in layers:
        config |= {"mlp_hidden_size": 40}
    if "s" in layers:
        config |= {"mamba2_head_dim": 8, "mamba2_state_size": 6, "mamba2_groups": 2}
    if "t" in layers:
        config |= {"mamba3_head_dim": 8, "mamba3_state_size": 8, "mamba3_groups": 2}
    if "d" in layers:
        config |= {"delta_head_dim": 8, "delta_key_dim": 6, "delta_key_heads": 2}
    config |= router
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, shape, generator) for name, shape in released_shapes(config).items()}
    return Tiny(config, weights)


def released_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, N, K = config["hidden_size"], config["state_size"], config["conv_dimension"]
    inner, rank, F = config["expansion_factor"] * D, math.ceil(D / 16), config["ffn_hidden_size"]
    halves = 2 if config.get("gated", True) else 1
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (config["vocab_size"], D)}
    for i, kind in enumerate(config["mamba_moe_layers"]):
        layer = {} if i % 2 and config.get("arrangement") == "parallel" else {"norm.weight": (D,)}
        if kind == "r":
            layer |= {
                "mixer.in_proj.weight": (2 * inner, D),
                "mixer.conv1d.weight": (inner, 1, K),
                "mixer.conv1d.bias": (inner,),
                "mixer.x_proj.weight": (rank + 2 * N, inner),
                "mixer.dt_proj.weight": (inner, rank),
                "mixer.dt_proj.bias": (inner,),
                "mixer.A_log": (inner, N),
                "mixer.D": (inner,),
                "mixer.out_proj.weight": (D, inner),
            }
            if config.get("mamba_norms"):
                sizes = {"dt": rank, "b": N, "c": N}
                layer |= {f"mixer.{part}_layernorm.weight": (size,) for part, size in sizes.items()}
        elif kind == "mamba2":
            heads = config.get("mamba2_heads") or inner // config["mamba2_head_dim"]
            channels, shared = heads * config["mamba2_head_dim"], config["mamba2_groups"] * config["mamba2_state_size"]
            layer |= {
                "mixer.in_proj.weight": (2 * channels + 2 * shared + heads, D),
                "mixer.conv1d.weight": (channels + 2 * shared, 1, K),
                "mixer.conv1d.bias": (channels + 2 * shared,),
                "mixer.dt_bias": (heads,),
                "mixer.A_log": (heads,),
                "mixer.D": (heads,),
                "mixer.norm.weight": (channels,),
                "mixer.out_proj.weight": (D, channels),
            }
            if config.get("mamba_norms"):
                layer |= {f"mixer.{part}_layernorm.weight": (shared,) for part in "bc"}
        elif kind == "mamba3":
            heads, state = inner // config["mamba3_head_dim"], config["mamba3_state_size"]
            angles = int(state * config.get("mamba3_rope_fraction", 0.5)) // 2
            rank = config.get("mamba3_rank", 1)
            rows = 2 * inner + 2 * rank * config["mamba3_groups"] * state + 3 * heads + angles
            layer |= {f"mixer.{name}": (heads,) for name in ("dt_bias", "D")}
            layer |= {f"mixer.{part}_bias": (heads, rank, state) for part in "BC"}
            if rank > 1:
                layer |= {f"mixer.mimo_{part}": (heads, rank, config["mamba3_head_dim"]) for part in "xzo"}
            layer |= {f"mixer.{part}_norm.weight": (state,) for part in "BC"}
            layer |= {"mixer.in_proj.weight": (rows, D), "mixer.out_proj.weight": (D, inner)}
            if config.get("mamba3_output_norm"):
                layer["mixer.norm.weight"] = (inner,)
        elif kind == "delta":
            heads, key, value = inner // config["delta_head_dim"], config["delta_key_dim"], config["delta_head_dim"]
            variant, qkv = config.get("delta_variant", "gdn"), 2 * config["delta_key_heads"] * key + inner
            gates = heads * (key + value) if variant == "gdn2" else heads
            low, decays = (heads, heads) if variant == "gdn" else (config.get("delta_decay_rank", key), heads * key)
            layer |= {
                "mixer.in_proj.weight": (inner + qkv + gates + low, D),
                "mixer.conv1d.weight": (qkv, 1, K),
                "mixer.dt_bias": (decays,),
                "mixer.A_log": (heads,),
                "mixer.norm.weight": (value,),
                "mixer.out_proj.weight": (D, inner),
            }
            if variant != "gdn":
                layer["mixer.decay_proj.weight"] = (decays, low)
        elif kind == "attention":
            channels = config.get("head_dim", D // config["num_attention_heads"])
            queries = channels * config["num_attention_heads"]
            rows = channels * (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
            layer |= {"mixer.linear_qkv.weight": (rows, D), "mixer.linear_proj.weight": (D, queries)}
            if config.get("qk_norm"):
                layer |= {f"mixer.{part}_layernorm.weight": (channels,) for part in "qk"}
        elif kind == "mlp":
            hidden = config["mlp_hidden_size"]
            layer |= {"mixer.linear_fc1.weight": (halves * hidden, D), "mixer.linear_fc2.weight": (D, hidden)}
        else:
            layer["mixer.router.weight"] = (int(kind), D)
            if config.get("router_bias", True):
                layer["mixer.router.bias"] = (int(kind),)
            if config.get("router_biased"):
                layer["mixer.router.expert_bias"] = (int(kind),)
            if shared := config.get("shared_expert_hidden_size"):
                layer["mixer.shared_experts.linear_fc1.weight"] = (halves * shared, D)
                layer["mixer.shared_experts.linear_fc2.weight"] = (D, shared)
            width = config.get("latent_size") or D
            if width != D:
                layer |= {"mixer.latent_down.weight": (width, D), "mixer.latent_up.weight": (D, width)}
            for e in range(int(kind)):
                layer[f"mixer.local_experts.{e}.linear_fc1.weight"] = (halves * F, width)
                layer[f"mixer.local_experts.{e}.linear_fc2.weight"] = (width, F)
        shapes |= {f"decoder.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["decoder.final_layernorm.weight"] = (D,)
    if config.get("final_norm") != "rms":
        shapes["decoder.final_layernorm.bias"] = (D,)
    return (
        shapes
        if config.get("tie_word_embeddings", True)
        else {**shapes, "output_layer.weight": (config["vocab_size"], D)}
    )


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(torch.arange(1, shape[-1] + 1.0)) + 0.3 * noise
    if len(shape) == 1:
        centre = next((value for end, value in _CENTRE.items() if name.endswith(end)), 0.0)
        return centre + 0.3 * noise
    if "embedding" in name:
        return noise
    fan_in = shape[-1]
    return noise * (1.5 if "router" in name else 1.0) / math.sqrt(fan_in)


def write_released(folder: Path, model: Tiny) -> Path:
    """The two files of a released checkpoint, as its authors write them."""
    folder.mkdir(parents=True, exist_ok=True)
    ours_alone = ("activation", "eod_reset")
    config = {key: value for key, value in model.config.items() if key not in ours_alone}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"model": dict(model.weights)}, folder / "pytorch_model.bin")
    return folder
