"""A model's weights as decoding reads them; each kind of layer packs its own (`kinds`).

Shapes: V vocabulary, D model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from megatron_blackmamba import norms
from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.inference.sampling import GenerationError
from megatron_blackmamba.interchange.canonical import HEAD, MTP_NORMS, Canonical
from megatron_blackmamba.layers import MTP, SCALINGS, Cannot, Decoding, kinds_in
from megatron_blackmamba.layers.decoding import tensors_of


@dataclass(frozen=True)
class ExtraDepth:
    embedding_norm_D: Tensor
    hidden_norm_D: Tensor
    final_norm_D: Tensor
    proj_DC: Tensor
    layers: tuple[Any, ...]
    norms_D: tuple[Tensor, ...]


@dataclass(frozen=True)
class Weights:
    config: ModelConfig
    embedding_VD: Tensor
    head_VD: Tensor
    """The embedding itself, if model.tie_embeddings."""
    layers: tuple[Any, ...]
    """Each as its kind packed it."""
    norms_D: tuple[Tensor | None, ...]
    """The norm before each layer; None where it is that of the layer before."""
    scalings_4D: tuple[tuple[Tensor, ...], ...]
    """With model.residual_scaling, those of each layer in the order of `SCALINGS`."""
    final_norm_parameters: tuple[Tensor, ...]
    """The parameters of the last norm, as its kind lists them."""
    extra: "ExtraDepth | None" = None
    """The extra depth of a checkpoint with model.mtp."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VD.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    def addresses(self) -> tuple[int, ...]:
        """Return where the tensors are in memory, which a captured step depends on."""
        layers = (tensor for layer in self.layers for tensor in tensors_of(layer))
        norms_D = (norm_D for norm_D in self.norms_D if norm_D is not None)
        scalings_D = (each for of_layer in self.scalings_4D for each in of_layer)
        every = (self.embedding_VD, self.head_VD, *layers, *norms_D, *scalings_D, *self.final_norm_parameters)
        return tuple(tensor.data_ptr() for tensor in every)

    @property
    def bytes_a_token(self) -> int:
        """Return what one step at batch 1 reads: everything but the experts that were not chosen."""
        vectors = (
            *self.final_norm_parameters,
            *self.norms_D,
            *(each for of_layer in self.scalings_4D for each in of_layer),
        )
        ends = self.head_VD.nbytes + sum(vector.nbytes for vector in vectors if vector is not None)
        how = decodings(self.config)
        return ends + sum(one.bytes_a_token(layer, self.config) for one, layer in zip(how, self.layers, strict=True))


def decodings(config: ModelConfig, pattern: str | None = None) -> list[Decoding]:
    """Return how each layer decodes, of the model or of a pattern; refuse it by the name of a layer that cannot."""
    pattern = config.pattern if pattern is None else pattern
    by_letter = {kind.letter: kind.decoding(config) for kind in kinds_in(pattern)}
    reasons = [answer.reason for answer in by_letter.values() if isinstance(answer, Cannot)]
    if reasons:
        raise GenerationError("; ".join(reasons))
    return [answer for letter in pattern if isinstance(answer := by_letter[letter], Decoding)]


def pack(model: Canonical, dtype: torch.dtype, device: torch.device | str = "cpu") -> Weights:
    """Read every tensor once, straight to its place."""

    def get(name: str, as_type: torch.dtype = torch.float32) -> Tensor:
        return model.entries[name].load().to(device=device, dtype=as_type)

    def packed(stack: str, pattern: str) -> tuple[Any, ...]:
        def of_layer(i: int) -> Callable[..., Tensor]:
            return lambda name, as_type=torch.float32: get(f"{stack}.layers.{i}.mixer.{name}", as_type)

        how = decodings(model.config, pattern)
        return tuple(one.pack(of_layer(i), model.config, dtype, device) for i, one in enumerate(how))

    def extra_depth(pattern: str) -> ExtraDepth:
        embedding, hidden, final = (get(f"{MTP}.{name}") for name in MTP_NORMS)
        norms_D = tuple(get(f"{MTP}.layers.{i}.norm.weight") for i in range(len(pattern)))
        return ExtraDepth(embedding, hidden, final, get(f"{MTP}.proj.weight", dtype), packed(MTP, pattern), norms_D)

    embedding_VD = get("embedding.word_embeddings.weight", dtype)
    return Weights(
        model.config,
        embedding_VD,
        embedding_VD if model.config.tie_embeddings else get(HEAD, dtype),
        packed("decoder", model.config.pattern),
        tuple(
            get(f"decoder.layers.{i}.norm.weight") if model.config.has_norm(i) else None
            for i in range(model.config.layers)
        ),
        tuple(tuple(get(f"decoder.layers.{i}.{name}") for name in SCALINGS) for i in range(model.config.layers))
        if model.config.residual_scaling
        else (),
        tuple(get(f"{norms.PREFIX}{name}") for name in norms.kind_of(model.config.final_norm).parameters),
        extra_depth(model.config.mtp.pattern) if model.config.mtp.pattern else None,
    )


def fitting_dtype(model: Canonical, device: torch.device) -> torch.dtype:
    """Return fp32 if the weights are stored in it or in fp16 and take less than half of the free memory, else bf16."""
    if model.dtype == torch.bfloat16:
        return torch.bfloat16
    needed = 4 * model.parameters
    return torch.float32 if needed < free_bytes(device) / 2 else torch.bfloat16


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
