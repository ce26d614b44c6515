"""The weights of a mixer: the names of their rows, and how tensor parallelism spreads them.

A kind declares each weight once. From it follow sharding, checkpoints of any layout, marks that megatron-core reads,
splits of what a matrix computes, width transfer, and the row maps of other formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"


@dataclass(frozen=True)
class Weight:
    """One parameter of a mixer: parts of rows, one behind the other, and the other axes."""

    rows: Mapping[str, tuple[int, ...]]
    """By name the rows of a part; several numbers are pieces of it that tensor parallelism splits one by one."""
    columns: tuple[int, ...]
    spread: str
    """ROWS: each rank has its share of every piece; COLUMNS: of the first column axis; WHOLE: each rank has it all."""
    groups: int = 1
    """How often the order of parts repeats. Tensor parallelism splits between groups if there are several."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.groups * sum(map(sum, self.rows.values())), *self.columns)

    @property
    def axis(self) -> int | None:
        """Return the axis that tensor parallelism splits."""
        return {ROWS: 0, COLUMNS: 1, WHOLE: None}[self.spread]

    def share(self, ranks: int) -> Weight:
        """Return what one of several tensor-parallel ranks holds."""
        if self.spread == WHOLE or ranks == 1:
            return self
        if self.spread == COLUMNS:
            return replace(self, columns=(self.columns[0] // ranks, *self.columns[1:]))
        if self.groups > 1:
            return replace(self, groups=self.groups // ranks)
        return replace(self, rows={name: tuple(n // ranks for n in pieces) for name, pieces in self.rows.items()})

    @property
    def pieces(self) -> list[int]:
        """Return the rows of each piece that tensor parallelism splits by itself."""
        if self.groups > 1 or self.spread != ROWS:
            return [self.shape[0]]
        return [rows for pieces in self.rows.values() for rows in pieces]

    def count(self, names: str) -> int:
        """Return the rows of some parts, with spaces between their names."""
        return self.groups * sum(sum(self.rows[name]) for name in names.split())

    def split(self, product: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Split what the matrix computes along its last axis; "x B C" keeps neighbours together. By default all.

        The gradients of the parts are joined in the order of memory: `[B, S]` may be a view of `[S, B]`.
        """
        assert self.groups == 1, "the parts of groups are no ranges of rows"
        sizes = [self.count(each) for each in names or self.rows]
        if product.dim() == 3 and product.stride(0) < product.stride(1):
            return tuple(part.transpose(0, 1) for part in product.transpose(0, 1).split(sizes, dim=-1))
        return product.split(sizes, dim=-1)

    def places(self) -> Iterator[tuple[str, slice]]:
        """Yield the name and the place of each part, in every group."""
        first = 0
        for _ in range(self.groups):
            for name, pieces in self.rows.items():
                yield name, slice(first, first + sum(pieces))
                first += sum(pieces)


def by_rows(*columns: int, **parts: int | tuple[int, ...]) -> Weight:
    """Declare a weight of which each tensor-parallel rank has some rows of every part."""
    return Weight(_pieces(parts), columns, ROWS)


def by_columns(*columns: int, **parts: int | tuple[int, ...]) -> Weight:
    """Declare a matrix of which each tensor-parallel rank has some columns."""
    return Weight(_pieces(parts), columns, COLUMNS)


def whole(*columns: int, **parts: int | tuple[int, ...]) -> Weight:
    """Declare a weight that every tensor-parallel rank has all of."""
    return Weight(_pieces(parts), columns, WHOLE)


def _pieces(parts: Mapping[str, int | tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: (rows,) if isinstance(rows, int) else tuple(rows) for name, rows in parts.items()}


class Stack(NamedTuple):
    """Parameters that a checkpoint holds as one tensor, stacked on a first axis, which expert parallelism splits."""

    weight: Weight
    """Of each. Parts of rows get an axis of their own."""
    parts: tuple[str, ...]
    """Canonical names, in order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the stack. A part is one entry of the first axis, viewed in the parameter's own shape."""
        weight = self.weight
        rows = (len(weight.pieces), weight.pieces[0]) if weight.spread == ROWS else weight.shape[:1]
        return (len(self.parts), *rows, *weight.columns)

    def share(self, experts: int, ranks: int) -> Stack:
        """Return what one rank of the groups of experts and of their tensor parallelism holds."""
        return Stack(self.weight.share(ranks), self.parts[: len(self.parts) // experts])

    @property
    def axis(self) -> int:
        """Return the axis that tensor parallelism of experts splits."""
        return 2


Declared = (Weight, Stack)
"""What a kind declares of a parameter."""
