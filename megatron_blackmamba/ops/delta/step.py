"""One token of the delta rule, for decoding.

Shapes: B batch, H heads, K key channels of a head, V value channels, D decays of a head: 1 or K.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops.delta.reference import advanced, read


@torch.no_grad()
def delta_step(
    state_BHKV: Tensor, q_BHK: Tensor, k_BHK: Tensor, erase_BHK: Tensor, written_BHV: Tensor, log_decay_BHD: Tensor
) -> Tensor:
    """Advance the state by one token in place and return y_BHV in q's dtype; arguments as for `delta`, without L."""
    q, k, erase, written, log_decay = (
        x.to(state_BHKV.dtype) for x in (q_BHK, k_BHK, erase_BHK, written_BHV, log_decay_BHD)
    )
    state_BHKV.copy_(advanced(state_BHKV, k, erase, written, log_decay))
    return read(state_BHKV, q).to(q_BHK.dtype)
