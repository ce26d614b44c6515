"""One token of the SSD scan, for decoding: the state is updated in place, and nothing needs a gradient.

Shapes: B batch, H heads, P channels of a head, G groups of heads, E heads of a group, N state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.ops.arguments import require_dimensions, require_shapes


@torch.no_grad()
def ssd_step(
    state_BHPN: Tensor,
    x_BHP: Tensor,
    dt_BH: Tensor,
    A_H: Tensor,
    B_BGN: Tensor,
    C_BGN: Tensor,
    D_H: Tensor | None = None,
    dt_bias_H: Tensor | None = None,
) -> Tensor:
    """Advance `state_BHPN` by one token in place and return y_BHP in x's dtype."""
    require_dimensions("ssd_step", "state", state_BHPN, 4)
    tensors: dict[str, Tensor | None] = {
        "state_BHPN": state_BHPN,
        "x_BHP": x_BHP,
        "dt_BH": dt_BH,
        "A_H": A_H,
        "B_BGN": B_BGN,
        "C_BGN": C_BGN,
    }
    tensors |= {"D_H": D_H, "dt_bias_H": dt_bias_H}
    require_shapes("ssd_step", tensors, **dict(zip("BHPN", state_BHPN.shape, strict=True)), G=B_BGN.shape[1])
    compute = torch.promote_types(x_BHP.dtype, torch.float32)
    x, dt, B_BGN, C_BGN = (tensor.to(compute) for tensor in (x_BHP, dt_BH, B_BGN, C_BGN))
    dt = F.softplus(dt if dt_bias_H is None else dt + dt_bias_H)
    groups = B_BGN.shape[1]
    state_BGEPN, added_BGEP = state_BHPN.unflatten(1, (groups, -1)), (dt[..., None] * x).unflatten(1, (groups, -1))
    state_BHPN.mul_(torch.exp(dt * A_H)[..., None, None])
    state_BGEPN.addcmul_(added_BGEP[..., None], B_BGN[:, :, None, None])
    y = torch.einsum("bgepn,bgn->bgep", state_BGEPN.to(compute), C_BGN).flatten(1, 2)
    if D_H is not None:
        y = y + D_H[:, None] * x
    return y.to(x_BHP.dtype)
