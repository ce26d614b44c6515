"""Log-likelihoods of continuations: each shared context is read once, and its state branches into the continuations.

Shapes: B batch, L length, T scored positions, D model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_blackmamba.inference import Decoder, State

VERSION = 3
"""Raise this when scores change, so that finished results of older versions are computed again."""
SHORTEST_SHARED = 8
"""Tokens that sequences must share before their common beginning is read apart."""
HEAD_ROWS = 512
"""Positions whose logits are in memory at once."""
PIECE = 2048
"""Tokens of a long sequence that the layers read at once; the state carries it on."""


@dataclass(frozen=True)
class Item:
    """A continuation to score after its context."""

    index: int
    tokens: tuple[int, ...]
    """Context and continuation."""
    scored: int
    """Length of the continuation."""

    @property
    def context(self) -> int:
        return len(self.tokens) - self.scored


class Score(NamedTuple):
    """The result of an item."""

    item: int
    log_likelihood: float
    greedy: bool
    """Whether greedy decoding writes the continuation."""


@dataclass(frozen=True)
class Group:
    """Items that begin with the same `shared` tokens."""

    shared: int
    items: tuple[Item, ...]

    @property
    def longest(self) -> int:
        """Return the tokens after the shared ones in the longest item; the last token of an item is never read."""
        return max(len(item.tokens) for item in self.items) - 1 - self.shared

    @property
    def tokens(self) -> int:
        """Return the number of tokens that scoring reads."""
        return self.shared + sum(len(item.tokens) - 1 - self.shared for item in self.items)


Batch = tuple[Group, ...]
"""Groups whose shared tokens are read together."""


def make_item(index: int, context: Sequence[int], continuation: Sequence[int], longest: int) -> Item:
    """Return an item of at most `longest` tokens before the last one, cut on the left as lm-eval does."""
    tokens = (*context, *continuation)[-(longest + 1) :]
    return Item(index, tokens, min(len(continuation), len(tokens) - 1))


def plan(items: Sequence[Item], batch_tokens: int) -> list[Batch]:
    """Group items into batches of at most `batch_tokens` padded tokens where possible, longest first."""
    groups = sorted(_groups(items), key=lambda group: (group.shared, group.longest), reverse=True)
    batches: list[Batch] = []
    batch: list[Group] = []
    for group in groups:
        apart = batch and bool(batch[0].shared) != bool(group.shared)
        width = batch[0].shared or batch[0].longest if batch else 0
        if batch and (apart or width * (len(batch) + 1) > batch_tokens):
            batches.append(tuple(batch))
            batch = []
        batch.append(group)
    return [*batches, tuple(batch)] if batch else batches


def _groups(items: Sequence[Item]) -> Iterator[Group]:
    """Yield neighbours in the order of their tokens that share at least half of the first one's context."""
    current: list[Item] = []
    shared = 0
    for item in sorted(items, key=lambda item: item.tokens):
        if current:
            common = _common(current[0].tokens, item.tokens, min(shared, item.context - 1))
            if common >= max(SHORTEST_SHARED, (current[0].context - 1) / 2):
                current.append(item)
                shared = common
                continue
            yield Group(shared if len(current) > 1 else 0, tuple(current))
        current, shared = [item], item.context - 1
    if current:
        yield Group(shared if len(current) > 1 else 0, tuple(current))


def _common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Return how many tokens two sequences begin with alike, at most `most`."""
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])


def score(decoder: Decoder, batch: Batch, batch_tokens: int) -> list[Score]:
    """Return the score of every item of a batch."""
    state = decoder.start(len(batch))
    if batch[0].shared:
        longest = max(group.shared for group in batch)
        rows = [group.items[0].tokens[: group.shared] for group in batch]
        tokens_BL = _tensor([(0,) * (longest - len(row)) + row for row in rows], decoder)
        lengths_B = _tensor([group.shared for group in batch], decoder) if len(batch) > 1 else None
        _read(decoder, state, tokens_BL, lengths_B)
    members = [(row, group.shared, item) for row, group in enumerate(batch) for item in group.items]
    members.sort(key=lambda member: len(member[2].tokens) - member[1], reverse=True)
    scores: list[Score] = []
    while members:
        width = len(members[0][2].tokens) - 1 - members[0][1]
        count = max(1, batch_tokens // width)
        part, members = members[:count], members[count:]
        branched = state.rows(_tensor([row for row, _, _ in part], decoder))
        stream_BLD = _read(
            decoder, branched, _tensor([_padded(item.tokens[shared:-1], width) for _, shared, item in part], decoder)
        )
        scores += _scores(decoder, stream_BLD, [(shared, item) for _, shared, item in part])
    return scores


def _scores(decoder: Decoder, stream_BLD: Tensor, part: list[tuple[int, Item]]) -> list[Score]:
    """Apply the head where a continuation's tokens are predicted, and add up by item."""
    places = [
        (row, at - 1 - shared, item.tokens[at])
        for row, (shared, item) in enumerate(part)
        for at in range(item.context, len(item.tokens))
    ]
    rows_T, columns_T, targets_T = _tensor(places, decoder).view(-1, 3).unbind(1)
    stream_TD = stream_BLD[rows_T, columns_T]
    sums_B = torch.zeros(len(part), dtype=torch.float64, device=stream_BLD.device)
    misses_B = torch.zeros(len(part), dtype=torch.long, device=stream_BLD.device)
    for some, nats_T, right_T in _nats(decoder, stream_TD, targets_T):
        sums_B.index_add_(0, rows_T[some], -nats_T)
        misses_B.index_add_(0, rows_T[some], (~right_T).long())
    found = zip(part, sums_B.tolist(), misses_B.tolist(), strict=True)
    return [Score(item.index, total, misses == 0) for (_, item), total, misses in found]


def _read(decoder: Decoder, state: State, tokens_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    """Return the stream after every token; without padding, the memory of the layers does not grow with the length."""
    if lengths_B is not None:
        return decoder.stream(state, tokens_BL, lengths_B)
    return torch.cat([decoder.stream(state, part_BL) for part_BL in tokens_BL.split(PIECE, dim=1)], dim=1)


def _nats(decoder: Decoder, stream_TD: Tensor, targets_T: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield a part of the rows, the nats of their targets in float64, and whether these are the likeliest tokens."""
    for start in range(0, len(targets_T), HEAD_ROWS):
        some = slice(start, start + HEAD_ROWS)
        logits_TV = decoder.logits_of_stream(stream_TD[some])
        chosen_T = logits_TV.gather(1, targets_T[some, None])[:, 0]
        yield some, (logits_TV.logsumexp(-1) - chosen_T).double(), logits_TV.argmax(-1) == targets_T[some]


@torch.inference_mode()
def token_nats(decoder: Decoder, tokens_BL: Tensor) -> Tensor:
    """Return the nats of every token but the first, `[B, L - 1]` float64, read from a fresh state in pieces."""
    tokens_BL = tokens_BL.to(decoder.weights.device)
    state, found = decoder.start(len(tokens_BL)), []
    for part_BL, targets_BL in zip(tokens_BL[:, :-1].split(PIECE, 1), tokens_BL[:, 1:].split(PIECE, 1), strict=True):
        stream_TD = decoder.stream(state, part_BL).flatten(0, 1)
        nats = [nats_T for _, nats_T, _ in _nats(decoder, stream_TD, targets_BL.flatten())]
        found.append(torch.cat(nats).unflatten(0, part_BL.shape))
    return torch.cat(found, dim=1).cpu()


def score_all(
    decoder: Decoder, batches: Sequence[Batch], batch_tokens: int, done: Callable[[Batch, list[Score]], None]
) -> None:
    """Score batches one after another in this process; call `done` after each."""
    with torch.inference_mode():
        for batch in batches:
            done(batch, score(decoder, batch, batch_tokens))


def _padded(tokens: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Pad on the right: a causal model never sees it."""
    return tokens + (0,) * (width - len(tokens))


def _tensor(values: list, decoder: Decoder) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=decoder.weights.device)
