"""RMS norm over the last dimension as PyTorch's operation, any dtype and device.

Shapes: D channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(compute), weight_D.shape, weight_D.to(compute), eps).to(weight_D.dtype)
