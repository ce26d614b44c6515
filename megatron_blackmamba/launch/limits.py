"""The doctor's look at limits and settings of this process: open files, and network cards that must exist."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_blackmamba.launch.findings import Finding

ADAPTERS = Path("/sys/class/infiniband")


def open_files(least: float) -> Iterator[Finding]:
    """Check the hard limit; training raises the soft limit as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= least
    found = f"{soft} may be open, at most {'any number' if hard == resource.RLIM_INFINITY else hard}"
    advice = f"at least {least:g} are needed: raise `ulimit -Hn` (LimitNOFILE of slurmd or the container)"
    yield Finding.judge("machine", "open files", found, enough, advice)


def network_cards() -> Iterator[Finding]:
    """Judge the cards that the environment names for NCCL and gloo."""
    cards = sorted(name for _, name in socket.if_nameindex())
    adapters = sorted(path.name for path in ADAPTERS.iterdir()) if ADAPTERS.is_dir() else []
    for variable, there, is_prefix in (
        ("GLOO_SOCKET_IFNAME", cards, False),
        ("NCCL_SOCKET_IFNAME", cards, True),
        ("NCCL_IB_HCA", adapters, True),
    ):
        wanted = os.environ.get(variable, "")
        if not wanted:
            continue
        wrong = [name for name in wanted.split(",") if not _exists(name, there, is_prefix)]
        if not is_prefix:
            bad = bool(wrong)  # gloo uses every card in the list
        else:
            bad = len(wrong) == len(wanted.split(","))  # NCCL uses those that match
        if wanted.startswith("^") and is_prefix:  # all but these
            bad = all(any(name.startswith(left_out) for left_out in wanted[1:].split(",")) for name in there)
        advice = f"there is no such card: set {variable} to one of {', '.join(there) or '(none here)'}, or unset it"
        yield Finding.judge("machine", variable, wanted, not bad, advice)


def _exists(name: str, there: list[str], is_prefix: bool) -> bool:
    """Match a name as NCCL does: a prefix, or after `=` the whole name; a port may follow a colon."""
    if not is_prefix or name.startswith("="):
        return name.lstrip("=").split(":")[0] in there
    return any(card.startswith(name.split(":")[0]) for card in there)
