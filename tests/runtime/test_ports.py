import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_blackmamba.runtime import ports
from tests.runtime.ranks import ROOT, environment


def test_no_port_is_given_twice(monkeypatch):
    monkeypatch.setattr(ports, "HIGHEST", ports.LOWEST + 1000)
    given = [ports.free_port() for _ in range(300)]
    assert len(set(given)) == 300
    for port in given:  # and each can be used
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names without a file")
def test_another_process_gets_other_ports(monkeypatch):
    ask = "from megatron_blackmamba.runtime import ports; print(ports.free_port(), flush=True); input()"
    command = [sys.executable, "-c", ask]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes) as other:
        taken = int(other.stdout.readline())
        monkeypatch.setattr(ports, "LOWEST", taken)
        monkeypatch.setattr(ports.random, "SystemRandom", InOrder)
        assert ports.free_port() > taken
        other.communicate("\n")


class InOrder:
    """A random generator that always tries the lowest port first."""

    def sample(self, numbers, count):
        return list(numbers)[:count]


def test_ports_of_listeners_and_connections_are_not_given(monkeypatch):
    with socket.socket() as server:
        server.bind(("", ports.free_port()))
        server.listen()
        monkeypatch.setattr(ports, "LOWEST", server.getsockname()[1])
        monkeypatch.setattr(ports.random, "SystemRandom", InOrder)
        assert ports.free_port() > ports.LOWEST
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if outgoing.exists():
        assert int(outgoing.read_text().split()[0]) >= ports.HIGHEST
