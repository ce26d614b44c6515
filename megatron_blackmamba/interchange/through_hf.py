"""A model's answer by the modeling files of exports, a layer in memory at a time, in fp32 and plain PyTorch.

Shapes: B batch, S sequence, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba import layers, norms
from megatron_blackmamba.interchange.canonical import HEAD, Canonical
from megatron_blackmamba.interchange.hf import own_classes, to_json
from megatron_blackmamba.interchange.observation import Observation, Router
from megatron_blackmamba.ops.softcap import capped
from megatron_blackmamba.routers import kind_of


@torch.inference_mode()
def observe(model: Canonical, tokens_BS: Tensor) -> Observation:
    """Return the outputs of the Hugging Face modeling code."""
    from megatron_blackmamba.hf import layers_blackmamba, modeling_blackmamba

    for table, entry, own_class in own_classes(model.config):
        getattr(layers_blackmamba, table)[entry] = own_class
    config = modeling_blackmamba.BlackMambaConfig(
        **{**to_json(model.config, model.sequence_length, torch.float32), "kernels": "torch", "auto_map": None}
    )
    embedding_VD = model.entries["embedding.word_embeddings.weight"].load().float()
    residual = embedding_VD[tokens_BS] * config.embedding_multiplier
    reset_BS, segment_BS = _resets(model, tokens_BS), torch.zeros_like(tokens_BS)
    if reset_BS is not None and not model.config.attention.across_documents:
        segment_BS = reset_BS.long().cumsum(1)
    ids = [tokens_BS] if kind_of(model.config.router.kind).reads_ids else []  # older modeling files take none
    routers: list[Router] = []
    carried: Tensor | None = None
    for i, kind in enumerate(layers.layers_of(model.config.pattern)):
        layer = _layer(config, model, i)
        if layer.norm is not None:
            shared = layer.norm(residual)
        if kind.routed:
            router = layer.mixer.router
            x_TD = shared.flatten(0, 1)
            logits_TE = router(x_TD, carried)[0] if getattr(router, "carries", False) else router(x_TD)
            selecting_BSE = router.selecting(logits_TE, *ids).view(*tokens_BS.shape, -1)
            routers.append(Router.of(i, selecting_BSE, model.config.top_k))
        own = {} if carried is None else {"carried_TR": carried}
        residual, _, _, *left = layer(residual, None, reset_BS, segment_BS, None, shared, *ids, **own)
        carried = next(iter(left), None)
    norm = norms.kind_of(model.config.final_norm)
    parameters_D = tuple(model.entries[f"{norms.PREFIX}{name}"].load().float() for name in norm.parameters)
    hidden = norm.apply(residual, parameters_D, model.config.norm_eps, *norm.own(model.config)) / config.logits_scaling
    head_VD = embedding_VD if model.config.tie_embeddings else model.entries[HEAD].load().float()
    return Observation(capped(F.linear(hidden, head_VD), model.config.logit_softcap), routers)


def _layer(config: Any, model: Canonical, index: int) -> Any:
    from megatron_blackmamba.hf.modeling_blackmamba import Layer

    with torch.device("meta"):
        layer = Layer(config, index)
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
