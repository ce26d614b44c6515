"""The gated delta rule: a linear recurrence that erases what its state holds under a key before it writes there.

For each head, with decays d = exp(log_decay), an erase key e, a key k and a written value u,

    kept[t]  = diag(d[t]) @ state[t - 1]
    state[t] = kept[t] + k[t] @ (u[t] - e[t].T @ kept[t])
    y[t]     = q[t].T @ state[t]

The family differs by what e, u and d are. Gated DeltaNet has one gate and one decay a head: e = beta * k, u = beta * v.
Kimi Delta Attention has a decay for each key channel. Gated DeltaNet-2 also has gates for each channel: e = b * k,
u = w * v. The state is fp32 whatever the activations are, or float64 where they are.

Shapes: B batch, L length, H heads, K key channels of a head, V value channels, D decays of a head: 1 or K.
"""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_dimensions, require_shapes
from megatron_blackmamba.ops.context import scan_part
from megatron_blackmamba.ops.delta.inputs import Inputs
from megatron_blackmamba.ops.delta.step import delta_step

BACKENDS = ("chunked", "triton", "reference")  # "auto" takes the first; triton is unmeasured


def delta(
    q_BLHK: Tensor,
    k_BLHK: Tensor,
    erase_BLHK: Tensor,
    written_BLHV: Tensor,
    log_decay_BLHD: Tensor,
    *,
    initial_state_BHKV: Tensor | None = None,
    reset_BL: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y_BLHV in q's dtype, and the state behind the last token, fp32 or float64.

    Args:
        erase_BLHK: The key times its erase gate. With keys of length 1, one gate a head from 0 to 2 cannot make the
            state grow; gates for each channel can, where similar keys with different gates follow each other.
        written_BLHV: The value times its write gate.
        log_decay_BLHD: At most 0; -inf forgets everything. One number a head, or one for each key channel.
        initial_state_BHKV: State before the first token; zero by default.
        reset_BL: True at the first token of a document, before which the state is reset to zero.
        backend: "auto" or a key of `megatron_blackmamba.ops.delta.available_backends()`.
    """
    inputs = Inputs(q_BLHK, k_BLHK, erase_BLHK, written_BLHV, log_decay_BLHD, initial_state_BHKV, reset_BL)
    return _backend_for(inputs, backend).scan(inputs)


def delta_part(
    q_BLHK: Tensor,
    k_BLHK: Tensor,
    erase_BLHK: Tensor,
    written_BLHV: Tensor,
    log_decay_BLHD: Tensor,
    *,
    group: dist.ProcessGroup,
    reset_BL: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return y_BLHV of this rank's part of the sequences; the ranks of the group have the parts, in order.

    A part maps its start by a matrix `[K, K]` for each head, so ranks exchange that and a state.
    """
    inputs = Inputs(q_BLHK, k_BLHK, erase_BLHK, written_BLHV, log_decay_BLHD, None, reset_BL)
    scan = _backend_for(inputs, backend).scan

    def from_start(part: Inputs, start: Tensor) -> tuple[Tensor, Tensor]:
        return scan(part._replace(initial_state_BHKV=start))

    return scan_part(from_start, lambda part: part.summary(scan), group, inputs, torch.matmul)


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def _backend_for(inputs: Inputs, backend: str) -> ModuleType:
    for name, tensor in (("q", inputs.q_BLHK), ("written", inputs.written_BLHV)):
        require_dimensions("delta", name, tensor, 4)
    (B, L, H, K), V, D = inputs.q_BLHK.shape, inputs.written_BLHV.shape[-1], inputs.log_decay_BLHD.shape[-1]
    require_shapes("delta", inputs, B=B, L=L, H=H, K=K, V=V, D=D)
    if D not in (1, K):
        raise ValueError(f"delta: log_decay has {D} decays a head. Pass 1, or one for each of the {K} key channels.")
    return backends.choose(__name__, BACKENDS, backend, inputs)
