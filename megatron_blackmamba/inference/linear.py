"""Weight times a few vectors: decoding does little else, and its speed is that of reading the weights.

Shapes: B batch, I in, O out.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_blackmamba.ops import decoding
from megatron_blackmamba.ops.matvec import MAX_VECTORS, matvec, product, why_not_cpp


def linear(x_BI: Tensor, weight_OI: Tensor, threads: int | None = None, fused: bool = True) -> Tensor:
    """Return x times the transposed weight; input and output are fp32 for every weight dtype."""
    if fused and (y_BO := decoding.product(x_BI, weight_OI)) is not None:
        return y_BO
    if why_not_cpp(weight_OI, x_BI) is None and x_BI.shape[0] <= MAX_VECTORS:
        return matvec(weight_OI, x_BI, threads)
    return product(x_BI, weight_OI).float()


@contextlib.contextmanager
def threads_for_matrices_alone(x_BI: Tensor, weight_OI: Tensor) -> Iterator[int]:
    """Yield the number of threads for `linear`, while everything else runs on one thread.

    The work between two matrices takes microseconds. Waking a second thread for it costs more than it saves, and a
    hundred times more on a busy machine.
    """
    threads = torch.get_num_threads()
    if why_not_cpp(weight_OI, x_BI) is not None:
        yield threads
        return
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
