"""Raise the limit of open files: each open shard is one, and the usual default is 1,024 per process."""

import os
import resource
from pathlib import Path

SPARE = 512
"""For sockets, libraries and whatever else a run opens."""


class TooManyFiles(ValueError):
    """More files than this user may open; the message says who can change that."""


def allow_open_files(more: int) -> None:
    """Raise the limit of this process so that `more` files can be opened beside those that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _open_now() + more + SPARE
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    if hard != resource.RLIM_INFINITY and wanted - SPARE > hard:
        raise TooManyFiles(
            f"{more} shards need as many open files, but this user may open {hard}: have the limit raised "
            "(`ulimit -Hn`; LimitNOFILE of slurmd), or make larger shards"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _open_now() -> int:
    table = Path("/proc/self/fd")
    return len(os.listdir(table)) if table.exists() else 0
