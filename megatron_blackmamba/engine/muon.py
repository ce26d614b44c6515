"""Muon on the shards of megatron-core's distributed optimizer: each matrix is made orthogonal once, by one rank.

The distributed optimizer gives each data-parallel rank a range of every buffer, so a range of some weights. Momentum is
kept there, in that shape, as Adam's moments are; so checkpoints need nothing new. A matrix that lies in several ranges
is collected by one of the ranks that have a part of it, the one with the least work so far. It sends the update back.
Tensor-parallel ranks gather the whole matrix and all compute its update, which is that of one process.

Matrices are the parts of weights that kinds declare (`layers/rows.py`). All other weights are updated by Adam.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
Run = tuple[int, int, int]
"""The number of a weight, and a range of its elements."""
Kind = tuple[int, int, int | None, float]
"""Rows, columns, axis and scale of matrices that are multiplied at once."""


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

    @property
    def kind(self) -> Kind:
        return (self.rows, self.columns, self.axis, self.scale)

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

    def runs(self, rank: int) -> list[Run]:
        return [(self.weight, *range_) for range_ in self.by_rank[rank]]


class Order(NamedTuple):
    """Runs of a flat tensor, joined anew in another order."""

    sizes: list[int]
    """Of the runs, as they lie."""
    places: list[int]
    """Of the run that comes first, of the second one, …"""

    @classmethod
    def between(cls, given: list[Run], wanted: list[Run]) -> "Order":
        """Return how to bring the same runs into another order; those that stay neighbours move as one."""
        place_of = {run: place for place, run in enumerate(given)}
        moved = [place_of[run] for run in wanted]
        heads = sorted(place for i, place in enumerate(moved) if i == 0 or place != moved[i - 1] + 1)
        joined = [given[here:after] for here, after in pairwise([*heads, len(given)])]
        number = {place: i for i, place in enumerate(heads)}
        sizes = [sum(end - start for _, start, end in runs) for runs in joined]
        return cls(sizes, [number[place] for place in moved if place in number])

    def there(self, flat: Tensor) -> Tensor:
        runs = flat.split(self.sizes)
        return torch.cat([runs[place] for place in self.places]) if len(runs) > 1 else flat

    def back(self, flat: Tensor) -> Tensor:
        places = sorted(range(len(self.places)), key=self.places.__getitem__)
        return Order([self.sizes[place] for place in self.places], places).there(flat)


class Shared(NamedTuple):
    """A weight that is updated here: this rank's range of it, and its matrices."""

    shard: Tensor | None
    """None where this rank owns no element of it."""
    owned: list[Range]
    """Of all data-parallel ranks."""
    matrices: list[Matrix]


class Batch(NamedTuple):
    """Matrices that are updated at once: which values go where, and back."""

    shards: list[Tensor]
    """This rank's ranges of weights."""
    to_owners: Order
    """From the shards to what is sent."""
    sent: list[int]
    """Elements to each rank."""
    received: list[int]
    to_matrices: Order
    """From what is received to the stacks."""
    stacks: dict[Kind, int]
    """The elements of this rank's matrices of each kind, one matrix behind the other."""

    @classmethod
    def of(cls, pieces: list[Piece], shared: Sequence[Shared], ranks: int, here: int) -> "Batch":
        """Plan the exchange of one rank; all of them sort the pieces alike."""
        pieces, everyone = sorted(pieces, key=lambda piece: (piece.owner, str(piece.matrix.kind))), range(ranks)
        mine = [piece for piece in pieces if piece.owner == here]
        sent = [run for piece in pieces for run in piece.runs(here)]
        received = [run for rank in everyone for piece in mine for run in piece.runs(rank)]
        whole = [run for piece in mine for rank in everyone for run in piece.runs(rank)]
        stacks = Counter[Kind]()
        for piece in mine:
            stacks[piece.matrix.kind] += sum(piece.sizes)
        return cls(
            [shard for number in sorted({run[0] for run in sent}) if (shard := shared[number].shard) is not None],
            Order.between(sorted(sent), sent),
            [sum(piece.sizes[here] for piece in pieces if piece.owner == rank) for rank in everyone],
            [sum(piece.sizes[rank] for piece in mine) for rank in everyone],
            Order.between(received, whole),
            stacks,
        )


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
        self._matrices: set[Tensor] = set()
        self._empty = torch.empty(0)
        """Of the type and on the device of what is exchanged."""
        self._batches: list[Batch] = []

    fused = False

    def share(self, weights: Iterable[Shared], ranks: Any, tensor_ranks: Any, empty: Tensor) -> None:
        """Take over the weights with matrices, in the order that all ranks of both groups have."""
        self.ranks, self.tensor_ranks, self._empty, shared = ranks, tensor_ranks, empty, list(weights)
        self._batches = [Batch.of(pieces, shared, ranks.size(), ranks.rank()) for pieces in in_batches(shared)]
        self._matrices = {shard for batch in self._batches for shard in batch.shards}

    def clip_heads(self, heads: list[Heads], cap: float) -> None:
        """Shrink queries and keys of heads with larger logits than the cap, after each update."""
        self.heads, self.cap = heads, cap

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.keep_momentum_alone()

    def keep_momentum_alone(self) -> None:
        """Leave matrices their momentum, where megatron-core has filled in the two moments of Adam."""
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
        group_of = {weight: group for group in self.param_groups for weight in group["params"]}
        for batch in self._batches:
            groups = [group_of[shard] for shard in batch.shards]
            updates = self._updates(batch, self._ahead(batch.shards, groups))
            for shard, group, update in zip(batch.shards, groups, updates, strict=True):
                shard.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        if self.heads:
            self._clip(group_of)
        return loss

    def _clip(self, group_of: dict[Tensor, dict[str, Any]]) -> None:
        """Shrink queries and keys by the roots of cap / largest logit; queries alone where several share a key.

        Weights with a learning rate of 0 stay. A shared key is left as it is, as in Kimi K2 (arXiv 2507.20534, section
        2.1), since other heads read it too.
        """
        assert self.cap is not None
        largest = torch.cat([layer.largest_H for layer in self.heads])
        if self.ranks.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks)
        for layer, of_layer in zip(self.heads, largest.split([len(h.largest_H) for h in self.heads]), strict=True):
            layer.largest_H.copy_(of_layer)
            if layer.shard is None or not group_of[layer.shard]["lr"]:
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

    def _ahead(self, shards: list[Tensor], groups: list[dict[str, Any]]) -> list[Tensor]:
        """Move the momenta of shards, and return where they will be after one more such gradient (Nesterov)."""
        if not shards:  # other ranks have all of these matrices; torch refuses an empty list
            return []
        gradients = [self._read(shard) for shard in shards]
        kept = [self._momentum(shard) for shard in shards]
        momenta = [before.to(shard.dtype, copy=True) for before, shard in zip(kept, shards, strict=True)]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        if self.moments:
            for before, momentum, shard, group in zip(kept, momenta, shards, groups, strict=True):
                bits = rounding.random_bits(before, before, shard, rounding.seed_of(group["step"]))
                before.copy_(rounding.to_bf16(momentum, bits))
        else:
            torch._foreach_copy_(kept, momenta)
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        return momenta

    def _momentum(self, shard: Tensor) -> Tensor:
        """Return the momentum of a shard in its precision; others may have added it."""
        state, precision = self.state[shard], self.moments or shard.dtype
        before = state[MOMENTUM] if MOMENTUM in state else torch.zeros_like(shard)
        state[MOMENTUM] = before.to(precision)
        return state[MOMENTUM]

    def _updates(self, batch: Batch, ahead: list[Tensor]) -> list[Tensor]:
        """Return the updates of the shards of a batch, of where their momenta will be."""
        flat = torch.cat([self._empty, *(values.view(-1) for values in ahead)])
        flat = self._exchanged(batch.to_owners.there(flat), batch.sent, batch.received)
        flat = batch.to_matrices.there(flat)
        stacks = zip(batch.stacks, flat.split([*batch.stacks.values()]), strict=True)
        made = [self._orthogonal(values, *kind) for kind, values in stacks]
        flat = batch.to_matrices.back(torch.cat([self._empty, *made]))
        flat = self._exchanged(flat, batch.received, batch.sent)
        parts = batch.to_owners.back(flat).split([values.numel() for values in ahead])
        return [part.view_as(values) for part, values in zip(parts, ahead, strict=True)]

    def _exchanged(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Exchange flat values: `sent` and `received` of each rank. A rank alone keeps its own."""
        if self.ranks.size() == 1:
            return flat
        result = flat.new_empty(sum(received))
        dist.all_to_all_single(result, flat, received, sent, group=self.ranks)
        return result

    def _orthogonal(self, flat: Tensor, rows: int, columns: int, axis: int | None, scale: float) -> Tensor:
        """Gather matrices over the tensor-parallel ranks, and return this rank's part of their updates."""
        x_NRC = flat.view(-1, rows, columns)
        group, ranks = self.tensor_ranks, 1 if axis is None else self.tensor_ranks.size()
        along = 1 + (axis or 0)
        if ranks > 1:
            parts = [torch.empty_like(x_NRC) for _ in range(ranks)]
            dist.all_gather(parts, x_NRC, group)
            x_NRC = torch.cat(parts, along)
        update_NRC = orthogonal(x_NRC, self.steps).mul_(SCALE * scale * max(x_NRC.shape[1:]) ** 0.5)
        return (update_NRC.chunk(ranks, along)[group.rank()] if ranks > 1 else update_NRC).flatten()


def in_batches(shared: Sequence[Shared]) -> Iterator[list[Piece]]:
    """Yield the matrices that are updated at a time, each with an owner."""
    size, batch = 0, []
    for number, weight in enumerate(shared):
        batch += [Piece(number, m, [m.within(owned) for owned in weight.owned]) for m in weight.matrices]
        size += sum(end - start for start, end in weight.owned)
        if size >= AT_ONCE or weight is shared[-1]:
            yield assigned(batch, len(weight.owned))
            size, batch = 0, []


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
