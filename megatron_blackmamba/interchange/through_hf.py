"""A model's answer by the modeling files of an export, a layer in memory at a time, in fp32 and plain PyTorch.

Shapes: B batch, S sequence, V vocabulary.
"""

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.interchange.canonical import Canonical
from megatron_blackmamba.interchange.hf import to_json
from megatron_blackmamba.interchange.observation import Observation, Router
from megatron_blackmamba.kinds import layers_of
from megatron_blackmamba.ops.softcap import capped

_NUMBERS = itertools.count()


@torch.inference_mode()
def observe(model: Canonical, tokens_BS: Tensor, modeling: Path | None = None) -> Observation:
    """Return the outputs of the Hugging Face modeling code, from the folder `modeling` or from this package."""
    code = _modeling(modeling)
    config = code.BlackMambaConfig(
        **{**to_json(model.config, model.sequence_length, torch.float32), "kernels": "torch", "auto_map": None}
    )
    embedding_VD = model.entries["embedding.word_embeddings.weight"].load().float()
    residual = embedding_VD[tokens_BS]
    reset_BS, segment_BS = _resets(model, tokens_BS), torch.zeros_like(tokens_BS)
    routers = []
    for i, kind in enumerate(layers_of(model.config.pattern)):
        layer = _layer(code, config, model, i)
        if layer.norm is not None:
            shared = layer.norm(residual)
        if kind.routed:
            router = layer.mixer.router
            routers.append(Router.of(i, router.selecting(router(shared)), model.config.top_k))
        residual, _, _ = layer(residual, None, reset_BS, segment_BS, None, shared)
    weight, bias = (model.entries[f"decoder.final_layernorm.{name}"].load().float() for name in ("weight", "bias"))
    hidden = F.layer_norm(residual, weight.shape, weight, bias, model.config.norm_eps)
    return Observation(capped(F.linear(hidden, embedding_VD), model.config.logit_softcap), routers)


def _layer(code: ModuleType, config: Any, model: Canonical, index: int) -> Any:
    with torch.device("meta"):
        layer = code.Layer(config, index)
    prefix = f"decoder.layers.{index}."
    weights = {
        name.removeprefix(prefix): entry.load().float()
        for name, entry in model.entries.items()
        if name.startswith(prefix)
    }
    layer.load_state_dict(weights, strict=True, assign=True)
    return layer


def _resets(model: Canonical, tokens_BS: Tensor) -> Tensor | None:
    if model.config.eod_reset is None:
        return None
    return F.pad(tokens_BS[:, :-1], (1, 0), value=-1) == model.config.eod_reset


def _modeling(folder: Path | None) -> ModuleType:
    if folder is None:
        from megatron_blackmamba.hf import modeling_blackmamba

        return modeling_blackmamba
    # Not by transformers' loader: it makes the folder's name part of a module's, which not every name can be.
    package = ModuleType(f"_exported_{next(_NUMBERS)}")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no __pycache__ in the export
    try:
        return importlib.import_module(f"{package.__name__}.modeling_blackmamba")
    finally:
        sys.dont_write_bytecode = before
