"""The delta rule as its definition reads: one token after another, gradients by autograd, any dtype.

Slow, and the yardstick for the other backends: give it float64.

Shapes: B batch, L length, H heads, K key channels of a head, V value channels, D decays of a head: 1 or K.
"""

import torch
from torch import Tensor

from megatron_blackmamba.ops.delta.inputs import Inputs


def scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    state_BHKV, reset_BL = inputs.start(), inputs.reset_BL
    q, k, erase, written, log_decay = (x.to(state_BHKV.dtype) for x in inputs[:5])
    y_steps = []
    for t in range(q.shape[1]):
        if reset_BL is not None:
            state_BHKV = state_BHKV.masked_fill(reset_BL[:, t, None, None, None], 0.0)
        state_BHKV = advanced(state_BHKV, k[:, t], erase[:, t], written[:, t], log_decay[:, t])
        y_steps.append(read(state_BHKV, q[:, t]))
    y = torch.stack(y_steps, dim=1) if y_steps else torch.zeros_like(written)
    return y.to(inputs.q_BLHK.dtype), state_BHKV


def advanced(
    state_BHKV: Tensor, k_BHK: Tensor, erase_BHK: Tensor, written_BHV: Tensor, log_decay_BHD: Tensor
) -> Tensor:
    """Return the state behind a token."""
    kept_BHKV = log_decay_BHD.exp()[..., None] * state_BHKV
    changed_BHV = written_BHV - read(kept_BHKV, erase_BHK)
    return kept_BHKV + k_BHK[..., None] * changed_BHV[..., None, :]


def read(state_BHKV: Tensor, key_BHK: Tensor) -> Tensor:
    """Return what the state holds under a key, `[B, H, V]`."""
    return (key_BHK[..., None, :] @ state_BHKV)[..., 0, :]
