"""One token of the selective scan, for decoding: the state is updated in place, and nothing needs a gradient.

Shapes: B batch, I inner channels, N state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.arguments import require_floats


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
    require_floats("selective_scan_step", state=state_BIN, u=u_BI, delta=delta_BI, A=A_IN, B=B_BN, C=C_BN)
    require_floats("selective_scan_step", D=D_I, z=z_BI, delta_bias=delta_bias_I)
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
