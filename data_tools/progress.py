"""The progress of reading raw text or shards, and numbers as people read them."""

import time
from collections.abc import Callable
from typing import NamedTuple

from megatron_blackmamba.progress import Progress, State


class Count(NamedTuple):
    """Sums over all shards so far."""

    input_bytes: int
    tokens: int
    documents: int


def reading(total_bytes: int, count: Callable[[], Count], *, quiet: bool = False) -> Progress:
    """Show how much of the input is read; 0 bytes in all is an input of unknown length."""
    begun = time.monotonic()

    def state() -> State:
        so_far = count()
        done = so_far.input_bytes / total_bytes if total_bytes else 0.0
        return State(min(done, 1.0), _rate(so_far, time.monotonic() - begun))

    return Progress(state, quiet=quiet)


def _rate(count: Count, seconds: float) -> str:
    return f"{short(count.tokens)} tokens, {short(count.tokens / max(seconds, 1e-9))} tokens/s"


def counted(number: int, what: str) -> str:
    """Return a number with its noun: 1 shard, 2 shards."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """Format a count: 1234567 as 1.23M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.4g}T"
