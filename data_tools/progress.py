"""The progress of reading raw text or shards, and numbers as people read them."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_blackmamba.console.progress import Progress, State


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
        rate = short(so_far.tokens / max(time.monotonic() - begun, 1e-9))
        return State(min(done, 1.0), f"{short(so_far.tokens)} tokens, {rate} tokens/s")

    return Progress(state, quiet=quiet)


def counted(number: int, what: str) -> str:
    """Return a number with its noun: 1 shard, 2 shards."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more files" if len(names) > most else "")


def short(number: float) -> str:
    """Format a count: 1234567 as 1.23M."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.4g}T"
