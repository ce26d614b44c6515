"""The limits that the doctor judges by; `blackmamba doctor --threshold NAME=VALUE` changes one."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


class ThresholdError(ValueError):
    """A threshold that does not exist, or is no number."""


@dataclass(frozen=True)
class Thresholds:
    """Minimum values for a machine and its network. Network values are per process; GB is 10^9 bytes."""

    open_files: float = 1024
    """Files that a process may open (hard limit; training raises the soft one itself)."""
    disk: float = 40
    """MiB/s that the run's disk writes, flushed."""
    checkpoints: float = 2
    """Checkpoints of the config that must fit on the disk."""
    clock: float = 5
    """Seconds that a node's clock may differ from the median of all nodes."""
    product: float = 0.8
    """Rate of matrix products on GPUs, as a part of the median of the other ranks."""
    cpu_product: float = 0.25
    """The same on CPUs, whose processes may share cores."""
    pair: float = 0.5
    """Best bandwidth to another node, as a part of the median of the other ranks."""
    cpu_pair: float = 0.2
    """The same between CPU processes."""
    pair_floor: float = 1.0
    """GB/s between two GPUs of different nodes, each way."""
    all_reduce_floor: float = 5.0
    """GB/s of bus bandwidth of an all-reduce over all GPUs."""
    all_to_all_floor: float = 1.0
    """GB/s that every GPU sends in an all-to-all over all GPUs."""
    cpu_floor: float = 0.01
    """GB/s in place of the three above between CPU processes (gloo)."""


def parse(settings: Iterable[str]) -> Thresholds:
    """Read NAME=VALUE settings."""
    names = {field.name for field in fields(Thresholds)}
    changed = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in names:
            raise ThresholdError(f"unknown threshold: --threshold {setting}. Choose from {', '.join(sorted(names))}.")
        try:
            changed[name] = float(value)
        except ValueError:
            raise ThresholdError(f"no number: --threshold {setting}. Write --threshold {name}=1.5.") from None
    return replace(Thresholds(), **changed)
