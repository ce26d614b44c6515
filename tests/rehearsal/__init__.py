"""One training step of the real trainer on fake CUDA tensors, in many layouts (benchmarks/rehearsal)."""

from typing import NamedTuple


class Case(NamedTuple):
    """A run to rehearse."""

    ranks: int
    config: str
    overrides: list[str]
