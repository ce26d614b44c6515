"""Muon on the shards of megatron-core's distributed optimizer: each matrix is made orthogonal once, by one rank.

The distributed optimizer gives each data-parallel rank a range of every buffer, so a range of some weights. Momentum is
kept there, in that shape, as Adam's moments are; so checkpoints need nothing new. A matrix that lies in several ranges
is collected by one of the ranks that have a part of it, the one with the least work so far. It sends the update back.
Tensor-parallel ranks gather the whole matrix and all compute its update, which is that of one process.

Matrices are the parts of weights that kinds declare (`layers/rows.py`). All other weights are updated by Adam.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.engine.adam import Adam
from megatron_blackmamba.layers import Stack, Weight
from megatron_blackmamba.ops.adam import rounding
from megatron_blackmamba.ops.orthogonal import flops, orthogonal

SCALE = 0.2
"""Gives updates the size of Adam's, so that one learning rate serves both (arXiv 2502.16982, section 2.2)."""
AT_ONCE = 2**27
"""Elements of the weights, over all ranks, that are exchanged and multiplied at a time."""
MOMENTUM = "momentum_buffer"

Range = tuple[int, int]
"""First element of a flat weight, and the one after the last."""


class Matrix(NamedTuple):
    """A matrix in a rank's weight: the ranges of elements that its rows are."""

    ranges: tuple[Range, ...]
    columns: int
    axis: int | None
    """The axis along which tensor-parallel ranks have parts of it; None: each has it all."""
    scale: float = 1.0
    """Factor of its updates."""

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.ranges) // self.columns

    def within(self, owned: Range) -> list[Range]:
        """Return the ranges of the matrix in a range of the weight."""
        both = [(max(start, owned[0]), min(end, owned[1])) for start, end in self.ranges]
        return [(start, end) for start, end in both if start < end]


def matrices_of(shape: Sequence[int], declared: Weight | Stack | None, axis: int | None, whole: bool) -> list[Matrix]:
    """Return the matrices of a rank's weight of this shape.

    declared: what the kind says of the weight here; None: it is one matrix, of which ranks have parts along `axis`.
    whole: take each weight, and each expert's, as one matrix.
    """
    columns, size = shape[-1], torch.Size(shape).numel()
    if declared is None:
        return [Matrix(((0, size),), columns, axis)]
    if isinstance(declared, Stack):
        each = size // shape[0] if whole or len(shape) == 3 else size // (shape[0] * shape[1])
        rows_are_split = declared.weight.axis == 0
        return [Matrix(((start, start + each),), columns, 0 if rows_are_split else 1) for start in range(0, size, each)]
    if whole:
        return [Matrix(((0, size),), columns, declared.axis)]
    places: dict[str, list[Range]] = defaultdict(list)
    for name, rows in declared.places():
        places[name].append((rows.start * columns, rows.stop * columns))
    return [Matrix(tuple(ranges), columns, declared.axis) for ranges in places.values()]


@dataclass
class Piece:
    """A matrix, and the ranges of its weight that the data-parallel ranks own."""

    weight: int
    """The number of the weight."""
    matrix: Matrix
    by_rank: list[list[Range]]
    owner: int = 0

    @property
    def sizes(self) -> list[int]:
        return [sum(end - start for start, end in ranges) for ranges in self.by_rank]


class Shared(NamedTuple):
    """A weight that is updated here: this rank's range of it, and its matrices."""

    shard: Tensor | None
    """None where this rank owns no element of it."""
    owned: list[Range]
    """Of all data-parallel ranks."""
    matrices: list[Matrix]


class Heads(NamedTuple):
    """The queries and keys of an attention layer's heads, which `qk_clip` shrinks."""

    shard: Tensor | None
    """This rank's range of the weight; None where it owns no element of it."""
    owned: Range
    shape: tuple[int, int, int, int]
    """Key heads, queries of each, channels, and columns of the weight. Rows are q, k and v of each key head."""
    largest_H: Tensor
    """The largest logit of each head of the batch on this rank; after the update, on all."""


class Muon(Adam):
    """Adam's state and settings for vectors, embedding and head; momentum for matrices."""

    def __init__(self, *args: Any, momentum: float, steps: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.momentum, self.steps = momentum, steps
        self.cap: float | None = None
        """Of attention logits."""
        self.heads: list[Heads] = []
        self.ranks: Any = None
        self.tensor_ranks: Any = None
        self.shared: list[Shared] = []
        self._matrices: set[Tensor] = set()
        self._empty = torch.empty(0)
        """Of the type and on the device of what is exchanged."""
        self._batches: list[list[Piece]] = []

    fused = False

    def share(self, weights: Iterable[Shared], ranks: Any, tensor_ranks: Any, empty: Tensor) -> None:
        """Take over the weights with matrices, in the order that all ranks of both groups have."""
        self.shared, self.ranks, self.tensor_ranks, self._empty = list(weights), ranks, tensor_ranks, empty
        self._matrices = {weight.shard for weight in self.shared if weight.shard is not None}
        self._batches = list(self._in_batches())

    def clip_heads(self, heads: list[Heads], cap: float) -> None:
        """Shrink queries and keys of heads with larger logits than the cap, after each update."""
        self.heads, self.cap = heads, cap

    def _in_batches(self) -> Iterator[list[Piece]]:
        """Yield the matrices that are updated at a time, each with an owner."""
        size, batch = 0, []
        for number, weight in enumerate(self.shared):
            batch += [Piece(number, m, [m.within(owned) for owned in weight.owned]) for m in weight.matrices]
            size += sum(end - start for start, end in weight.owned)
            if size >= AT_ONCE:
                yield assigned(batch, len(weight.owned))
                size, batch = 0, []
        if batch:
            yield assigned(batch, len(self.shared[0].owned))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; megatron-core fills in two moments for every weight that has none yet."""
        super().load_state_dict(state_dict)
        for shard in self._matrices:
            state = self.state[shard]
            if MOMENTUM not in state and "exp_avg" in state:
                state[MOMENTUM] = state.pop("exp_avg")
                state.pop("exp_avg_sq", None)
            if self.moments and MOMENTUM in state:
                state[MOMENTUM] = state[MOMENTUM].to(self.moments)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        groups = {weight: group for group in self.param_groups for weight in group["params"]}
        for batch in self._batches:
            numbers = sorted({piece.weight for piece in batch})
            ahead = {n: self._moved(w, groups[w]) for n in numbers if (w := self.shared[n].shard) is not None}
            for number, update in self._updates(batch, ahead).items():
                shard = self.shared[number].shard
                assert shard is not None
                group = groups[shard]
                shard.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        if self.heads:
            self._clip()
        return loss

    def _clip(self) -> None:
        """Shrink queries and keys by the roots of cap / largest logit; queries alone where several share a key.

        A shared key is left as it is, as in Kimi K2 (arXiv 2507.20534, section 2.1), since other heads read it too.
        """
        assert self.cap is not None
        largest = torch.cat([layer.largest_H for layer in self.heads])
        if self.ranks.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks)
        for layer, of_layer in zip(self.heads, largest.split([len(h.largest_H) for h in self.heads]), strict=True):
            layer.largest_H.copy_(of_layer)
            if layer.shard is None:
                continue
            groups, queries, channels, columns = layer.shape
            factor_GQ = (self.cap / of_layer).where(of_layer > self.cap, 1.0).view(groups, queries, 1)
            factors = factor_GQ.new_ones(groups, queries + 2, channels)
            if queries == 1:
                factors[:, :2] = factor_GQ.sqrt()
            else:
                factors[:, :queries] = factor_GQ
            whole = factors.flatten().repeat_interleave(columns)
            layer.shard.mul_(whole[slice(*layer.owned)].to(layer.shard.dtype).view_as(layer.shard))

    def _update(self, group: dict[str, Any]) -> None:
        """Update by Adam what is no matrix."""
        super()._update({**group, "params": [p for p in group["params"] if p not in self._matrices]})

    def _moved(self, shard: Tensor, group: dict[str, Any]) -> Tensor:
        """Move the momentum of a shard, and return where it will be after one more such gradient (Nesterov)."""
        state, gradient = self.state[shard], self._read(shard)
        kept = state.get(MOMENTUM, torch.zeros_like(shard))
        kept = state[MOMENTUM] = kept.to(self.moments or shard.dtype)  # others may have added it
        momentum = kept.to(shard.dtype).lerp(gradient, 1 - self.momentum)
        if self.moments:
            bits = rounding.random_bits(kept, kept, shard, rounding.seed_of(group["step"]))
            kept.copy_(rounding.to_bf16(momentum, bits))
        else:
            kept.copy_(momentum)
        return momentum.lerp_(gradient, 1 - self.momentum)

    def _updates(self, batch: list[Piece], ahead: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the update of each shard of a batch, of where its momentum will be."""
        here = self.ranks.rank()
        parts = {id(piece): self._cut(piece, ahead) for piece in batch}
        mine = [piece for piece in batch if piece.owner == here]
        collected = self._exchanged(batch, mine, parts)
        updates = self._orthogonal(mine, collected)
        returned = self._exchanged_back(batch, mine, updates)
        found = {number: torch.zeros_like(values) for number, values in ahead.items()}
        for piece in batch:
            self._paste(piece, returned[id(piece)], found)
        return found

    def _cut(self, piece: Piece, values: dict[int, Tensor]) -> Tensor | None:
        """Return this rank's elements of a matrix, one behind the other."""
        ranges = piece.by_rank[self.ranks.rank()]
        if not ranges:
            return None
        first, flat = self.shared[piece.weight].owned[self.ranks.rank()][0], values[piece.weight].view(-1)
        return torch.cat([flat[start - first : end - first] for start, end in ranges])

    def _paste(self, piece: Piece, part: Tensor | None, values: dict[int, Tensor]) -> None:
        if part is None:
            return
        first, flat = self.shared[piece.weight].owned[self.ranks.rank()][0], values[piece.weight].view(-1)
        at = 0
        for start, end in piece.by_rank[self.ranks.rank()]:
            flat[start - first : end - first] = part[at : at + end - start]
            at += end - start

    def _exchanged(self, batch: list[Piece], mine: list[Piece], parts: dict[int, Any]) -> dict[int, Tensor]:
        """Send the parts of matrices to their owners; return the whole ones of this rank, by `id` of the piece."""
        ranks = self.ranks.size()
        sent = [[parts[id(p)] for p in batch if p.owner == r and parts[id(p)] is not None] for r in range(ranks)]
        sizes = [sum(piece.sizes[r] for piece in mine) for r in range(ranks)]
        received = self._all_to_all([part for of_rank in sent for part in of_rank], [_sum(s) for s in sent], sizes)
        places, whole = [0] * ranks, {}
        for piece in mine:
            from_ranks = []
            for r, size in enumerate(piece.sizes):
                from_ranks.append(received[r][places[r] : places[r] + size])
                places[r] += size
            whole[id(piece)] = torch.cat(from_ranks)
        return whole

    def _exchanged_back(self, batch: list[Piece], mine: list[Piece], updates: dict[int, Tensor]) -> dict[int, Any]:
        """Send the updates of this rank's matrices to where their parts are; return this rank's parts."""
        ranks, here = self.ranks.size(), self.ranks.rank()
        cut = {id(piece): updates[id(piece)].split(piece.sizes) for piece in mine}
        sent = [cut[id(piece)][r] for r in range(ranks) for piece in mine]
        sizes = [sum(piece.sizes[r] for piece in mine) for r in range(ranks)]
        back = [sum(piece.sizes[here] for piece in batch if piece.owner == r) for r in range(ranks)]
        received, places, found = self._all_to_all(sent, sizes, back), [0] * ranks, {}
        for piece in batch:
            size, r = piece.sizes[here], piece.owner
            found[id(piece)] = received[r][places[r] : places[r] + size] if size else None
            places[r] += size
        return found

    def _all_to_all(self, parts: list[Tensor], sent: list[int], received: list[int]) -> Sequence[Tensor]:
        """Exchange flat values: `sent` and `received` of each rank. A rank alone keeps its own."""
        flat = torch.cat([self._empty, *parts])
        if self.ranks.size() == 1:
            return [flat]
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self.ranks)
        return result.split(received)

    def _orthogonal(self, mine: list[Piece], whole: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the scaled orthogonal matrices, as flat as given; those of one shape are multiplied at once."""
        alike: dict[tuple[int, int, int | None, float], list[Piece]] = defaultdict(list)
        for piece in mine:
            shape = (piece.matrix.rows, *piece.matrix[1:])
            alike[shape].append(piece)
        found: dict[int, Tensor] = {}
        for (rows, columns, axis, scale), pieces in alike.items():
            x_NRC = torch.stack([whole[id(piece)].view(rows, columns) for piece in pieces])
            update_NRC = self._whole_update(x_NRC, axis, scale)
            found |= {id(piece): update.flatten() for piece, update in zip(pieces, update_NRC, strict=True)}
        return found

    def _whole_update(self, x_NRC: Tensor, axis: int | None, scale: float) -> Tensor:
        """Gather matrices over the tensor-parallel ranks, and return this rank's part of their updates."""
        group, ranks = self.tensor_ranks, 1 if axis is None else self.tensor_ranks.size()
        along = 1 + (axis or 0)
        if ranks > 1:
            parts = [torch.empty_like(x_NRC) for _ in range(ranks)]
            dist.all_gather(parts, x_NRC.contiguous(), group)
            x_NRC = torch.cat(parts, along)
        update_NRC = SCALE * scale * max(x_NRC.shape[1:]) ** 0.5 * orthogonal(x_NRC, self.steps)
        return update_NRC.chunk(ranks, along)[group.rank()] if ranks > 1 else update_NRC


def _sum(parts: list[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def assigned(batch: list[Piece], ranks: int) -> list[Piece]:
    """Give each matrix to a rank that has a part of it: the one that has the least work so far, the largest first.

    The choice depends on sizes alone, so all ranks come to the same.
    """
    load = [0] * ranks

    def work(piece: Piece) -> int:
        return flops(piece.matrix.rows, piece.matrix.columns)

    def holders(piece: Piece) -> list[int]:
        return [rank for rank, size in enumerate(piece.sizes) if size]

    for piece in sorted(batch, key=lambda piece: (len(holders(piece)) > 1, -work(piece))):
        piece.owner = min(holders(piece), key=lambda rank: (load[rank], rank))
        load[piece.owner] += work(piece)
    return batch
