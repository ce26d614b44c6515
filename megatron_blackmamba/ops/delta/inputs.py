"""The arguments of one call of `delta`, as its backends receive them.

Shapes: B batch, L length, H heads, K key channels of a head, V value channels, D decays of a head: 1 or K.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """Fields whose shape begins with BL have an entry for each token."""

    q_BLHK: Tensor
    k_BLHK: Tensor
    erase_BLHK: Tensor
    written_BLHV: Tensor
    log_decay_BLHD: Tensor
    initial_state_BHKV: Tensor | None = None
    reset_BL: Tensor | None = None

    def start(self) -> Tensor:
        """Return the state before the first token."""
        compute = torch.promote_types(self.q_BLHK.dtype, torch.float32)
        if self.initial_state_BHKV is not None:
            return self.initial_state_BHKV.to(compute)
        B, _, H, K = self.k_BLHK.shape
        return self.q_BLHK.new_zeros(B, H, K, self.written_BLHV.shape[-1], dtype=compute)

    @torch.no_grad()
    def summary(self, scan: Callable[[Any], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the matrix by which these tokens map a start, `[B, H, K, K]`, and what they add.

        Both are columns of one scan: it begins with the unit matrix, to which nothing is written, beside zeros.
        """
        added = self.start()
        unit = torch.eye(added.shape[2], dtype=added.dtype, device=added.device).expand(*added.shape[:3], -1)
        K = unit.shape[-1]
        both = self._replace(
            written_BLHV=F.pad(self.written_BLHV, (K, 0)), initial_state_BHKV=torch.cat((unit, added), dim=-1)
        )
        map_BHKK, added_BHKV = scan(both)[1].split((K, added.shape[3]), dim=-1)
        return map_BHKK, added_BHKV
