"""Time, memory and use of the devices."""

from megatron_blackmamba.training.metrics.base import Taken, metric


@metric("speed/tokens_per_second", "Tokens a second", format=",.0f", unit="tokens/s", in_line=True, from_zero=True,
        order=4)  # fmt: skip
def tokens_per_second(taken: Taken) -> float:
    """Return the tokens of a step over its time, on all ranks together."""
    return taken.tokens / taken.seconds


@metric("speed/step_seconds", "Seconds a step", format=".3f", unit="s", in_line=True, in_report=False, order=5)
def step_seconds(taken: Taken) -> float:
    """Return the time of the step, without validation and saving."""
    return taken.seconds


@metric("speed/memory_bytes", "Memory", format=lambda value: f"{value / 2**30:.2f} GiB", in_table=True,
        in_report=False, order=7)  # fmt: skip
def memory(taken: Taken) -> int:
    """Return the peak memory of this rank so far: GPU memory, or the memory of the process without a GPU."""
    from megatron_blackmamba.training.watch.speed import memory_bytes

    return memory_bytes()


@metric("speed/mfu", "Part of the GPU's peak used (MFU)", format=".1%", label="MFU", in_line=True, from_zero=True,
        order=6)  # fmt: skip
def mfu(taken: Taken) -> float | None:
    """Return the part of the GPU's peak that the model's own arithmetic used; None where the peak is not known."""
    return taken.utilisation.of(taken.tokens, taken.seconds)


@metric("speed/slowest_rank", "Slowest rank", in_report=False, order=80)
def slowest_rank(taken: Taken) -> int | None:
    """Return the rank that took the most time for its own work, if there are several."""
    from megatron_blackmamba.training.watch.stragglers import slowest

    slow = slowest(taken.losses.computing)
    return slow.rank if slow else None


@metric("speed/slowest_over_median", "Slowest rank over the median rank", order=81)
def slowest_over_median(taken: Taken) -> float | None:
    """Return its time over the median of the other ranks' times."""
    from megatron_blackmamba.training.watch.stragglers import slowest

    slow = slowest(taken.losses.computing)
    return slow.over_median if slow else None
