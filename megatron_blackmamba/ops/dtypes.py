"""The number formats that ops take."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def require_floats(op: str, **tensors: Tensor | None) -> None:
    """Refuse complex numbers, integers and 8-bit floats, by the name of the op and of its argument."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise ValueError(f"{op}: {name} is {str(tensor.dtype).removeprefix('torch.')}. Pass one of {known}.")
