"""Measurements of a study's routers: their own choice against the balanced one, and who goes where.

Shapes: T tokens, E experts, B windows, L tokens of a window.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.inference import Decoder, load
from megatron_blackmamba.layers import routes
from megatron_blackmamba.layers.experts.decode import ExpertsDecoding
from megatron_blackmamba.routers import RouterKind, Tokens, largest
from megatron_blackmamba.study.corpus import SOURCES
from megatron_blackmamba.study.points import ROUTING
from megatron_blackmamba.study.runs import Cell, Study

BATCHES = 16
WINDOWS = {"code": 14, "prose": 2}
"""Windows of each source in a batch, about as the study `trend` trains on them."""
LENGTH = 256

Found = dict[str, float]
MEANING = {
    "own": "share of tokens whose balanced expert is the one they prefer",
    "entropy": "entropy of the softmax of a token's logits, 1 if all experts are equally likely",
    "spread": "standard deviation of a token's logits",
    "busiest": "busiest expert over the mean by the tokens' own choice, in the least balanced layer",
    "sources": "what the expert tells of the source: mutual information over the entropy of the source",
    "loss": "validation loss, experts chosen as in inference",
    "balanced": "validation loss, experts chosen as in training",
    "plain": "validation loss, experts chosen by the largest logit, without the kept bias",
}


@dataclass
class Watched(ExpertsDecoding):
    """Experts that note the logits, their own choice and the balanced one of each layer."""

    rule: str = "loss"
    """The key of `MEANING` whose rule chooses."""
    logits: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)

    def choose(self, kind: RouterKind, logits_TE: Tensor, at: Tokens) -> Tensor:
        own_TK = super().choose(kind, logits_TE, at)
        self.logits.append(logits_TE)
        self.own.append(own_TK)
        if type(kind).choose is RouterKind.choose or not kind.every_token_gets_k:  # megatron-core chooses
            return own_TK
        self.trained.append(kind.choose(logits_TE, replace(at, groups={at.model.router.scope: None})))
        rules = {"balanced": self.trained[-1], "plain": largest(logits_TE, at.model.top_k)}
        return rules.get(self.rule, own_TK)


def measure(study: Study, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
    """Look at each finished model with experts of `config.watched`; once each, since its run does not change."""
    for cell in cells:
        if _looked_at(study, cell) and cell.done and not _file(cell).exists():
            say(f"routing of {cell.name}")
            atomic.write_json(
                _file(cell), look(load(cell.folder.root, dtype=torch.float32, device="cpu").decoder, study)
            )


def _looked_at(study: Study, cell: Cell) -> bool:
    return cell.seed in (study.config.watched or study.config.seeds[:1]) and routes(cell.config.model.pattern)


def _file(cell: Cell) -> Path:
    return cell.folder.root / ROUTING


@torch.inference_mode()
def look(decoder: Decoder, study: Study) -> Found:
    """Return the numbers of `MEANING`, means over the layers where nothing else is said.

    A router that chooses in training as in inference has no other rule, and nothing that is said of it.
    """
    windows, sources_T = _windows(study)
    loss, layers = _pass(decoder, windows, "loss")
    agreed = [(seen.own == seen.trained).all(1).float().mean().item() for seen in layers if seen.trained is not None]
    others = {}
    if agreed:
        others = {rule: _pass(decoder, windows, rule)[0] for rule in ("balanced", "plain")}
        others["own"] = statistics.fmean(agreed)
    probabilities = [seen.logits.softmax(-1) for seen in layers]
    entropies = [torch.special.entr(p_TE).sum(-1).mean().item() / math.log(p_TE.shape[1]) for p_TE in probabilities]
    loads = [torch.bincount(seen.own.flatten(), minlength=seen.logits.shape[1]).float() for seen in layers]
    return {
        **others,
        "entropy": statistics.fmean(entropies),
        "spread": statistics.fmean(seen.logits.std(-1).mean().item() for seen in layers),
        "busiest": max((load_E.max() / load_E.mean()).item() for load_E in loads),
        "sources": statistics.fmean(information(seen.own[:, 0], sources_T) for seen in layers),
        "loss": loss,
    }


@dataclass(frozen=True)
class Seen:
    """All tokens of one layer."""

    logits: Tensor
    own: Tensor
    trained: Tensor | None


def _pass(decoder: Decoder, windows: Sequence[Tensor], rule: str) -> tuple[float, list[Seen]]:
    """Read the windows; return the mean loss, and what each layer with experts did."""
    before, watched = decoder.how, [Watched(rule) if how.routes else how for how in decoder.how]
    decoder.how = watched
    losses = []
    for tokens_BL in windows:
        logits_BLV = decoder.read_all(decoder.start(len(tokens_BL)), tokens_BL[:, :-1])
        losses.append(cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten()).item())
    decoder.how = before
    layers = [
        Seen(torch.cat(how.logits), torch.cat(how.own), torch.cat(how.trained) if how.trained else None)
        for how in watched
        if isinstance(how, Watched)
    ]
    return statistics.fmean(losses), layers


def _windows(study: Study) -> tuple[list[Tensor], Tensor]:
    """Return batches of windows from all over the validation sets, and the source of each token."""
    read = {source: _spread(study, source, BATCHES * WINDOWS[source]) for source in SOURCES}
    batches, sources = [], []
    for i in range(BATCHES):
        parts = [read[source][i * n : (i + 1) * n] for source, n in WINDOWS.items()]
        batches.append(torch.cat(parts))
        sources += [torch.full((len(part) * LENGTH,), number) for number, part in enumerate(parts)]
    return batches, torch.cat(sources)


def _spread(study: Study, source: str, count: int) -> Tensor:
    """Return windows at equal distances from a source's validation set."""
    (path,) = (study.corpus.folder / "tokens" / source / "validation").glob("*.bin")
    tokens = np.memmap(path, np.uint16, "r")
    starts = np.linspace(0, len(tokens) - LENGTH - 1, count).astype(int)
    return torch.from_numpy(np.stack([tokens[start : start + LENGTH + 1] for start in starts]).astype(np.int64))


def information(one_T: Tensor, other_T: Tensor) -> float:
    """Return the mutual information of two labels of each token over the entropy of the second."""
    joint = torch.zeros(int(one_T.max()) + 1, int(other_T.max()) + 1, dtype=torch.float64)
    joint.index_put_((one_T, other_T), torch.ones(len(one_T), dtype=torch.float64), accumulate=True)
    joint /= joint.sum()
    entropies = [torch.special.entr(each).sum().item() for each in (joint, joint.sum(1), joint.sum(0))]
    return (entropies[1] + entropies[2] - entropies[0]) / entropies[2] if entropies[2] else 0.0
