"""The bias of Sinkhorn's plan, found from text for a finished model, so that inference chooses as training did.

A model trained with `sinkhorn`, such as the released ones, becomes one of `sinkhorn_bias` with the same weights.

Shapes: E experts, T tokens, B windows, L tokens of a window, V vocabulary.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.evaluation.texts import encoded, text_files
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.generator import usable_device
from megatron_blackmamba.inference.weights import fitting_dtype, pack
from megatron_blackmamba.interchange.canonical import Canonical, Entry, main_depth, shapes, tokenizer_of
from megatron_blackmamba.layers.experts.decode import ExpertsDecoding
from megatron_blackmamba.routers import RouterKind, Tokens

BATCH_TOKENS = 8192
"""Tokens that are balanced together."""
FEWEST = 8
"""Windows of text that are needed."""
BIAS = ".router.expert_bias"


@dataclass
class Planned(ExpertsDecoding):
    """Experts that balance the tokens of each batch as in training, and add up the biases of the plans."""

    biases_E: list[Tensor] = field(default_factory=list)

    def choose(self, kind: RouterKind, logits_TE: Tensor, at: Tokens) -> Tensor:
        self.biases_E.append(torch.zeros(logits_TE.shape[1], dtype=torch.float64, device=logits_TE.device))
        alone: dict[str, None] = {at.model.router.scope: None}
        return kind.choose(logits_TE, replace(at, groups=alone, plan_bias_E=self.biases_E[-1]))


@dataclass(frozen=True)
class Gain:
    """Nats per token of the windows that found no bias, before and after."""

    before: list[float]
    after: list[float]
    tokens: int
    """Tokens of all windows, of which half found the bias."""

    def __str__(self) -> str:
        less = [b - a for b, a in zip(self.before, self.after, strict=True)]
        before, after, gained = (statistics.fmean(each) for each in (self.before, self.after, less))
        error = statistics.stdev(less) / len(less) ** 0.5
        return (
            f"nats per token: {before:.4f} with the largest logit, {after:.4f} with the kept bias: {gained:+.4f} gained"
            f" (standard error {error:.4f}, {len(less)} windows of the second half of {self.tokens:,} tokens)"
        )


def kept(model: Canonical, files: Sequence[Path], tokens: int, device: str | None) -> tuple[Canonical, Gain]:
    """Return a model with the mean bias of the plans for the first half of a text, and its gain on the second."""
    if (kind := model.config.router.kind) not in ("sinkhorn", "sinkhorn_bias"):
        raise EvaluationError(f"{model.source}: model.router.kind={kind}: only sinkhorn has such a bias")
    model, where = main_depth(model), usable_device(device)
    plain = ModelConfig.model_validate(_with_kind(model.config, "sinkhorn"))
    names = {name for name in model.entries if name.endswith(BIAS)}
    bare = {name: entry for name, entry in model.entries.items() if name not in names}
    decoder = _decoder(replace(model, config=plain, entries=bare), where)
    first, second = _halves(model, files, tokens)
    before = _losses(decoder, second)
    own = decoder.how
    decoder.how = [Planned() if how.routes else how for how in own]
    _losses(decoder, first)
    biases = [torch.stack(how.biases_E).mean(0).float().cpu() for how in decoder.how if isinstance(how, Planned)]
    decoder.how = own
    changed = _with_bias(replace(model, config=plain, entries=bare), biases)
    after = _losses(_decoder(changed, where), second)
    return changed, Gain(before, after, first.numel() + second.numel() - len(first) - len(second))


def _with_kind(config: ModelConfig, kind: str) -> dict[str, Any]:
    content = config.model_dump()
    return {**content, "router": {**content["router"], "kind": kind}}


def _with_bias(model: Canonical, biases: Sequence[Tensor]) -> Canonical:
    """Return the model with the biases of its layers of experts, in the order of the network."""
    config = ModelConfig.model_validate(_with_kind(model.config, "sinkhorn_bias"))
    names = [name for name in shapes(config) if name.endswith(BIAS)]

    def of(bias_E: Tensor) -> Callable[[], Tensor]:
        return lambda: bias_E

    added = {name: Entry((len(b),), torch.float32, of(b)) for name, b in zip(names, biases, strict=True)}
    return replace(model, config=config, entries={**model.entries, **added})


def _decoder(model: Canonical, where: torch.device) -> Decoder:
    return Decoder(pack(model, fitting_dtype(model, where), where))


def _halves(model: Canonical, files: Sequence[Path], tokens: int) -> tuple[Tensor, Tensor]:
    """Return windows of the documents, one behind another: the first half, and the second."""
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise EvaluationError(f"{model.source}: this model has no tokenizer. Name one with --tokenizer FILE")
    stream: list[int] = []
    for text in text_files(files, None):
        for document in encoded([*text.documents()], tokenizer):
            stream += document[bool(stream) :]  # one end of document between two
            if len(stream) > tokens:
                break
    length = model.sequence_length
    count = min(tokens, len(stream)) // (length + 1)
    if count < FEWEST:
        raise EvaluationError(f"{len(stream):,} tokens of text are too few: give {FEWEST * (length + 1):,} at least")
    windows_BL = torch.tensor(stream[: count * (length + 1)]).view(count, length + 1)
    return windows_BL[: count // 2], windows_BL[count // 2 :]


def _losses(decoder: Decoder, windows_BL: Tensor) -> list[float]:
    """Return the nats per token of each window."""
    losses: list[float] = []
    for batch_BL in windows_BL.split(max(1, BATCH_TOKENS // windows_BL.shape[1])):
        batch_BL = batch_BL.to(decoder.weights.device)
        logits_BLV = decoder.read_all(decoder.start(len(batch_BL)), batch_BL[:, :-1])
        nats_BL = cross_entropy(logits_BLV.flatten(0, 1).float(), batch_BL[:, 1:].flatten(), reduction="none")
        losses += nats_BL.view(len(batch_BL), -1).mean(1).tolist()
    return losses
