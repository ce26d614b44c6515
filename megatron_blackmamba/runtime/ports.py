"""Ports on this machine for processes that are about to start."""

import random
import socket
import sys

LOWEST, HIGHEST = 10_000, 20_000
"""Below the ports that Linux gives to outgoing connections, and below those of scripts/slurm/train_job.sh."""
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a port for a server that starts soon. This process never gets it again.

    A port that the kernel picks may belong to an outgoing connection by the time the server starts. Processes that
    call this function claim their ports until they end, so that two of them never get the same.
    """
    for port in random.SystemRandom().sample(range(LOWEST, HIGHEST), 1000):
        try:
            with socket.socket() as probe:
                probe.bind(("", port))
                _claim(port)
        except OSError:
            continue
        return port
    raise OSError(f"no free port: 1000 tried between {LOWEST} and {HIGHEST}. End programs that hold them (ss -lt).")


def of_job(job: int) -> int:
    """Return the port of a Slurm job, the same on every rank."""
    return LOWEST + job % (HIGHEST - LOWEST)


def _claim(port: int) -> None:
    """Bind a name without a file, which the kernel frees with this process. Only Linux has such names."""
    if sys.platform == "linux":
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0blackmamba-port-{port}")
        except OSError:
            claim.close()
            raise
        _claims.append(claim)
