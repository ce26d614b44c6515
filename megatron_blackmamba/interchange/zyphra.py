"""The released BlackMamba format, in and out: config.json and pytorch_model.bin.

Its config says nothing of the activation. The paper trains SwiGLU (SiLU), yet the released inference code gates with
erf-GELU whatever the config says; which one the released weights were trained with cannot be settled from outside.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_blackmamba import norms
from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.formats.atomic import write_json
from megatron_blackmamba.interchange import files, torch_file
from megatron_blackmamba.interchange.canonical import Canonical, InterchangeError, require_convertible
from megatron_blackmamba.interchange.json_config import layer_list, model_config, need, read_json, trained_length
from megatron_blackmamba.layers import kinds_in, routes
from megatron_blackmamba.routers import Use, kind_of

CONFIG, WEIGHTS, TRUTH = "config.json", files.TORCH, "blackmamba.json"
"""The last one is ours: what the model really is, where the format cannot say it."""

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "state_size": "state_size",
    "conv_dimension": "conv_kernel",
    "expansion_factor": "expand",
    "ffn_hidden_size": "expert_hidden_size",
}


@dataclass(frozen=True)
class Activation:
    """The one to import with, and why."""

    name: str
    reason: str


def choose_activation(folder: Path, wanted: str | None = None) -> Activation:
    """Return the requested activation, else the one that the exporter recorded, else the released code's."""
    if wanted is not None:
        return Activation(wanted, "as asked for with --activation")
    if (folder / TRUTH).is_file():
        return Activation(need(read_json(folder / TRUTH), "activation", folder / TRUTH), f"so says {folder / TRUTH}")
    return Activation(
        "gelu",
        "the released inference code gates with erf-GELU, so this gives the logits it gives; the paper says SwiGLU: "
        "pass --activation silu if these weights were trained with it",
    )


def read(folder: Path, activation: str | None = None, tokenizer: Path | None = None) -> Canonical:
    """Read the released files; weights may be sharded, a bare state dict, or in safetensors."""
    folder = Path(folder)
    path = folder / CONFIG
    content = read_json(path)
    for field, expected in (("add_bias_linear", False), ("swiglu", True)):
        if content.get(field, expected) is not expected:
            raise InterchangeError(f"{path}: {field} is {content[field]!r}; only {expected} is BlackMamba")
    fields = {ours: need(content, theirs, path) for theirs, ours in _FIELDS.items()}
    config = model_config({**fields, "activation": choose_activation(folder, activation).name}, content, path, _FIELDS)
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = folder / "tokenizer.json"
    entries = files.read(folder, (WEIGHTS, files.SAFETENSORS))
    return Canonical(config, entries, str(folder), tokenizer, trained_length(content, path))


def write(model: Canonical, folder: Path) -> None:
    """Fill `folder` with files that the released inference code loads."""
    require_expressible(model.config, model.source)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, to_json(model.config, model.sequence_length))
    torch_file.write(folder / WEIGHTS, model.entries)
    note = {"activation": model.config.activation}
    warning = warning_about(model.config)
    write_json(folder / TRUTH, note | ({"warning": warning} if warning else {}))


def to_json(config: ModelConfig, sequence_length: int) -> dict[str, Any]:
    return {
        "num_layers": config.layers,
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
        "mamba_moe_layers": layer_list(config),
        "bias": False,
        "add_bias_linear": False,
        "swiglu": True,
        "max_sequence_length": sequence_length,
    }


def warning_about(config: ModelConfig) -> str | None:
    """Return a warning if the released code would compute this model incorrectly, else None."""
    if config.activation == "gelu" or not routes(config.pattern):
        return None
    return (
        "This model's experts gate with SiLU (SwiGLU). The released BlackMamba inference code always gates with "
        "erf-GELU, and its config has no field to say otherwise: run there, this model computes something else than it "
        f"was trained to. {TRUTH} beside the weights says what is true; `blackmamba import zyphra` and "
        "`blackmamba generate` follow it."
    )


def require_expressible(config: ModelConfig, source: str) -> None:
    """Refuse a model that the format cannot express: it has one character per layer and few other fields."""
    require_convertible(config, source)
    other = {kind.name for kind in kinds_in(config.pattern) if not kind.released}
    default_rank = math.ceil(config.hidden_size / 16)
    problems = {
        "pattern": other
        and f"{config.pattern}; the released format has no character for {' and '.join(sorted(other))}",
        "arrangement": config.arrangement != "sequential"
        and f"{config.arrangement}; the released code has one norm a layer",
        "residual_scaling": config.residual_scaling and "true; the released code only adds",
        "experts": routes(config.pattern)
        and not 2 <= config.experts <= 9
        and f"{config.experts}; the released format writes 2 to 9, one character a layer",
        "top_k": routes(config.pattern)
        and config.top_k != 1
        and f"{config.top_k}; the released code sends a token to one expert",
        "router.kind": routes(config.pattern)
        and kind_of(config.router.kind).use(config) != Use("sigmoid")
        and f"{config.router.kind}; the released code scales by the sigmoid of the largest logit",
        "shared_expert_hidden_size": routes(config.pattern)
        and config.shared_expert_hidden_size is not None
        and f"{config.shared_expert_hidden_size}; the released code has no shared expert",
        "latent_size": config.latent_size and f"{config.latent_size}; the released code's experts read the whole width",
        "dt_rank": config.dt_rank_or_default != default_rank
        and f"{config.dt_rank}; the released code computes it as hidden_size / 16, rounded up ({default_rank})",
        "eod_reset": config.eod_reset is not None
        and f"{config.eod_reset}; the released code lets the state run across documents",
        "mamba_norms": config.mamba_norms and "true; the released code has no norms in a Mamba layer",
        "logit_softcap": config.logit_softcap and f"{config.logit_softcap}; the released code does not cap logits",
        "multipliers": (config.multipliers.embedding, config.multipliers.residual, config.logits_divisor) != (1, 1, 1)
        and "not 1; the released code has no multipliers, and a width transfer divides the logits",
        "final_norm": not norms.kind_of(config.final_norm).released
        and f"{config.final_norm}; the released code has layer",
        "tie_embeddings": not config.tie_embeddings and "false; the released code ties them",
        "gated": not config.gated and "false; the released code gates experts",
        "activation": config.activation == "relu2" and "relu2; the released code has erf-GELU",
        "router.bias": routes(config.pattern) and not config.router.bias and "false; the released code has one",
        "norm_eps": config.norm_eps != 1e-5 and f"{config.norm_eps}; the released code has 1e-5",
    }
    for field, problem in problems.items():
        if problem:
            raise InterchangeError(f"{source}: cannot be expressed in the released format: model.{field} is {problem}")
