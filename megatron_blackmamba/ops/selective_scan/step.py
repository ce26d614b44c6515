"""One token of the selective scan, for decoding: the state is updated in place, and nothing needs a gradient.

Shapes: B batch, I inner channels, N state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.arguments import require_dimensions, require_shapes


@torch.no_grad()
def selective_scan_step(
    state_BIN: Tensor,
    u_BI: Tensor,
    delta_BI: Tensor,
    A_IN: Tensor,
    B_BN: Tensor,
    C_BN: Tensor,
    D_I: Tensor | None = None,
    z_BI: Tensor | None = None,
    delta_bias_I: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Advance `state_BIN` by one token in place and return y_BI in u's dtype."""
    require_dimensions("selective_scan_step", "state", state_BIN, 3)
    tensors: dict[str, Tensor | None] = {
        "state_BIN": state_BIN,
        "u_BI": u_BI,
        "delta_BI": delta_BI,
        "A_IN": A_IN,
        "B_BN": B_BN,
        "C_BN": C_BN,
    }
    tensors |= {"D_I": D_I, "z_BI": z_BI, "delta_bias_I": delta_bias_I}
    require_shapes("selective_scan_step", tensors, **dict(zip("BIN", state_BIN.shape, strict=True)))
    compute = torch.promote_types(u_BI.dtype, torch.float32)
    u, delta, B, C = (x.to(compute) for x in (u_BI, delta_BI, B_BN, C_BN))
    if delta_bias_I is not None:
        delta = delta + delta_bias_I
    if delta_softplus:
        delta = F.softplus(delta)
    state_BIN.mul_(torch.exp(delta[:, :, None] * A_IN)).addcmul_((delta * u)[:, :, None], B[:, None, :])
    y = torch.einsum("bin,bn->bi", state_BIN.to(compute), C)
    if D_I is not None:
        y = y + D_I * u
    if z_BI is not None:
        y = y * F.silu(z_BI.to(compute))
    return y.to(u_BI.dtype)
