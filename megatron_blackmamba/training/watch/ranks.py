"""Ranks by number and host, for messages that send someone to a machine."""

import socket
from collections.abc import Iterable

from megatron_blackmamba.runtime.world import gathered


class Ranks:
    """The host of every rank of a run."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts

    @classmethod
    def of_run(cls) -> "Ranks":
        """Ask every rank for its host."""
        return cls(gathered(socket.gethostname()))

    def named(self, ranks: Iterable[int]) -> str:
        """Return `rank 3 (node-a)` or `ranks 3 (node-a), 9 (node-b)`."""
        found = [f"{rank} ({self.hosts[rank]})" for rank in sorted(ranks)]
        return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"
