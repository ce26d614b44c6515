"""An example of a new op: the square of ReLU, by PyTorch's operations and by a kernel of Triton each way."""

from torch import Tensor

from megatron_blackmamba.ops import backends
from megatron_blackmamba.ops.arguments import require_floats

BACKENDS = ("triton", "reference")  # best first, each where it applies


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def squared(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the square of ReLU."""
    require_floats("squared", x=x)
    return backends.choose(__name__, BACKENDS, backend, x).squared(x)
