"""The order of tokens by expert: two launches on a GPU, else a sort.

Shapes: P pairs of a token and an expert, E experts.
"""

from torch import Tensor

from megatron_blackmamba.ops import backends

BACKENDS = ("triton", "reference")  # best first, each where it applies


def available_backends() -> dict[str, str | None]:
    """Name -> None where this machine can use it, else the reason why not."""
    return backends.available(__name__, BACKENDS)


def order_of(choice_P: Tensor, experts: int, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Return the pair at each place, the place of each pair, and the number of pairs of each expert, all int64.

    The pairs are in the order of their experts, and those of an expert in their own order.

    choice_P: The expert of each pair, int64. A number outside `range(experts)` gives undefined results.
    """
    choice_P = choice_P.contiguous()
    chosen = backends.choose(__name__, BACKENDS, backend, choice_P, experts)
    return chosen.order_of(choice_P, experts)
