"""Compare the replicas of every weight, bit for bit.

A weight held by several ranks must be equal on all of them. Such replicas exist over data parallelism and expert data
parallelism. Unsharded weights (norms, routers) are also replicated over tensor parallelism, and a tied embedding at
both ends of a pipeline. As in a checkpoint, replicas are identified by key and offset.

Hashes stay on the device. Each rank fills in its own pieces, and one all-reduce of a few thousand numbers compares all
of them. In contrast, megatron-core's `check_param_hashes_across_dp_replicas` copies every weight to the CPU and ignores
tensor-parallel replicas.
"""

from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.model import LanguageModel
from megatron_blackmamba.model.initialise import shards
from megatron_blackmamba.runtime.world import World, gathered
from megatron_blackmamba.training.watch.ranks import Ranks

Piece = tuple[str, tuple[int, ...]]
"""A weight's key, and the offset of a shard in it."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By bytes of a number. The top bits of 64 would be lost among the 62 of a fingerprint, so those are two numbers."""
ROW = 1024
LARGEST = (1 << 62) - 1
SHOWN = 3


class Replicas:
    """The pieces of the model on this rank, and their comparison with the replicas on other ranks."""

    def __init__(self, world: World, model: LanguageModel, ranks: Ranks) -> None:
        self.world, self.model, self.ranks = world, model, ranks
        self.weights = list(model.parameters())
        self._find_pieces()
        self.held = Counter(piece for pieces in gathered(list(self.pieces)) for piece in pieces)
        self.order = sorted(self.held)

    def differing(self) -> str | None:
        """Return which ranks hold which weights differently, the same text on every rank; None if all agree."""
        if max(self.held.values()) == 1:
            return None
        if self._places() != self.where:
            self._find_pieces()
        numbers = torch.stack(self._hashes())
        together = torch.stack([numbers, LARGEST - numbers])
        together[:, [piece not in self.pieces for piece in self.order]] = -1
        dist.all_reduce(together, dist.ReduceOp.MAX)
        differ = (together[0] != LARGEST - together[1]).nonzero().flatten().tolist()
        return self._described([self.order[i] for i in differ], numbers[differ].tolist()) if differ else None

    def _find_pieces(self) -> None:
        self.pieces: dict[Piece, Tensor] = {
            (shard.key, tuple(shard.global_offset)): shard.data.detach()
            for shard in shards(self.model.sharded_state_dict())
        }
        self.where = self._places()

    def _places(self) -> list[int]:
        return [weight.data_ptr() for weight in self.weights]

    def _hashes(self) -> list[Tensor]:
        none = next(iter(self.pieces.values())).new_zeros((), dtype=torch.int64)
        return [fingerprint(self.pieces[piece]) if piece in self.pieces else none for piece in self.order]

    def _described(self, pieces: list[Piece], mine: list[int]) -> str:
        """Name the ranks that disagree with the majority, or all ranks of a piece without a majority."""
        held = {piece: value for piece, value in zip(pieces, mine, strict=True) if piece in self.pieces}
        everywhere: list[dict[Piece, int]] = gathered(held)
        suspects: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for piece in pieces:
            values = {rank: values[piece] for rank, values in enumerate(everywhere) if piece in values}
            usual, count = Counter(values.values()).most_common(1)[0]
            most = 2 * count > len(values)
            suspects[tuple(rank for rank, value in values.items() if not most or value != usual)].append(piece[0])
        return "; ".join(f"{self.ranks.named(who)} in {_listed(names)}" for who, names in suspects.items())


def fingerprint(x: Tensor) -> Tensor:
    """Return a 62-bit number of a tensor's bits, as a tensor on its device. A single flipped bit always changes it."""
    bits = x.reshape(-1).view(BITS[x.element_size()])
    whole = bits.numel() // ROW * ROW
    sums = bits[:whole].view(-1, ROW).sum(1, dtype=torch.int64)
    sums = torch.cat([sums, bits[whole:].sum(dtype=torch.int64).view(1)])
    odd = torch.arange(len(sums), device=x.device) * 0x5851F42D4C957F2E + 0x14057B7EF767814F  # overflows, and may
    return (sums * odd).sum() & LARGEST


def _listed(names: list[str]) -> str:
    names = sorted(set(names))
    more = f" and {len(names) - SHOWN} more weights" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
