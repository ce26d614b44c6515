"""The outputs of a model for some tokens, and the comparison of two models' outputs.

Shapes: B batch, S sequence, V vocabulary, E experts, K experts of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TIE = 1e-4
"""What a router chooses by, closer than this, is a tie: rounding may send the token to either expert, and both are
right."""
CLOSE = 1e-4
"""Largest difference of logits that rounding explains, as a part of the largest logit."""


@dataclass(frozen=True)
class Router:
    """The decisions of one mixture layer."""

    layer: int
    choice_BSK: Tensor
    """In ascending order."""
    margin_BS: Tensor
    """How far the last chosen expert was above the best of the others."""

    @classmethod
    def of(cls, layer: int, selecting_BSE: Tensor, top_k: int) -> "Router":
        """Return the decisions of a router; `selecting_BSE` are the numbers whose largest are chosen."""
        best = selecting_BSE.topk(min(top_k + 1, selecting_BSE.shape[-1]), dim=-1)
        choice_BSK = best.indices[..., :top_k].sort(dim=-1).values
        if best.values.shape[-1] == top_k:  # all are chosen
            return cls(layer, choice_BSK, torch.full_like(selecting_BSE[..., 0], torch.inf))
        return cls(layer, choice_BSK, best.values[..., -2] - best.values[..., -1])

    def differs(self, other: "Router") -> Tensor:
        """Return where another model chose otherwise, `[B, S]`."""
        return (self.choice_BSK != other.choice_BSK).any(dim=-1)


@dataclass(frozen=True)
class Observation:
    logits_BSV: Tensor
    routers: list[Router]


@dataclass(frozen=True)
class Comparison:
    """The difference between two models on the same tokens."""

    tokens: int
    largest_difference: float
    """Of any logit."""
    largest_logit: float
    same_top1: int
    decisions: int
    differing_decisions: int
    ties: int
    """Tokens set aside because a router before or at them was at a tie and went the other way."""
    written: int = 0
    """Tokens that the other model wrote, greedily."""
    same_written: int = 0
    """Those of them that are the first model's best too."""
    reader: str = "this package alone"
    """The tool that ran the other model."""

    @property
    def agrees(self) -> bool:
        close = self.largest_difference <= CLOSE * max(1.0, self.largest_logit)
        same = self.same_top1 == self.tokens and self.same_written == self.written
        return close and same and self.differing_decisions == 0 and self.tokens > 0

    def __str__(self) -> str:
        text = (
            f"largest logit difference {self.largest_difference:.1e} (logits up to {self.largest_logit:.1f}), "
            f"top-1 agreement {self.same_top1}/{self.tokens}"
        )
        if self.decisions:
            text += f", same expert {self.decisions - self.differing_decisions}/{self.decisions}"
        if self.written:
            text += f", same greedy token {self.same_written}/{self.written}"
        text += f", {self.ties} tokens after a tie set aside" if self.ties else ""
        return f"{text} (loaded by {self.reader})"


def compare(one: Observation, other: Observation, steps_BNV: Tensor | None = None) -> Comparison:
    """Compare two models on the same tokens; the other one may not tell its experts.

    steps_BNV: the logits from which the other model wrote the last N tokens greedily, computed step by step.
    """
    kept_BS = _before_ties(one, other)
    differing = sum(int((a.differs(b) & kept_BS).sum()) for a, b in zip(one.routers, other.routers, strict=False))
    differences = [_difference(one.logits_BSV, other.logits_BSV, kept_BS)]
    top1 = _is_best(one.logits_BSV, other.logits_BSV.argmax(dim=-1)) & kept_BS
    written = same_written = 0
    if steps_BNV is not None:
        before = slice(-steps_BNV.shape[1] - 1, -1)
        ours_BNV, judged_BN = one.logits_BSV[:, before], kept_BS[:, before]
        differences.append(_difference(ours_BNV, steps_BNV, judged_BN))
        written = int(judged_BN.sum())
        same_written = int((_is_best(ours_BNV, steps_BNV.argmax(dim=-1)) & judged_BN).sum())
    tokens = int(kept_BS.sum())
    return Comparison(
        tokens=tokens,
        largest_difference=max(differences),
        largest_logit=float(one.logits_BSV.abs().max()),
        same_top1=int(top1.sum()),
        decisions=tokens * len(other.routers),
        differing_decisions=differing,
        ties=kept_BS.numel() - tokens,
        written=written,
        same_written=same_written,
    )


def _difference(one_BSV: Tensor, other_BSV: Tensor, kept_BS: Tensor) -> float:
    """Return the largest difference of a logit, or infinity if a logit is not finite or no token is left."""
    if not (torch.isfinite(other_BSV).all() and kept_BS.any()):
        return float("inf")
    return float((one_BSV - other_BSV).abs().amax(dim=-1)[kept_BS].max())


def _before_ties(one: Observation, other: Observation) -> Tensor:
    """Return the tokens before the first one routed differently at a tie, which affects all later ones."""
    tied_BS = torch.zeros(one.logits_BSV.shape[:2], dtype=torch.bool)
    if other.routers:
        for a, b in zip(one.routers, other.routers, strict=True):
            tied_BS |= a.differs(b) & (torch.minimum(a.margin_BS, b.margin_BS) < TIE)
    else:
        for router in one.routers:
            tied_BS |= router.margin_BS < TIE
        allowed = CLOSE * max(1.0, float(one.logits_BSV.abs().max()))
        other_BS = (one.logits_BSV - other.logits_BSV).abs().amax(dim=-1) > allowed
        tied_BS &= other_BS.flip(1).cumsum(dim=1).flip(1) > 0  # it went another way if this token or a later differs
    return tied_BS.cumsum(dim=1) == 0


def _is_best(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return whether tokens are the most likely ones, but for rounding."""
    best_BS = logits_BSV.amax(dim=-1)
    given_BS = logits_BSV.gather(-1, tokens_BS[..., None])[..., 0]
    return best_BS - given_BS <= 1e-4 * best_BS.abs().clamp(min=1.0)
