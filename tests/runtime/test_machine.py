"""Memory of the machine, within the limits of control groups of both versions."""

import psutil
import pytest

from megatron_blackmamba.runtime import machine

GIB = 2**30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Write files below /proc and /sys/fs/cgroup of a pretended machine of 64 GiB, 60 of them free."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")

    def write(**files):
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(content))

    write(**{"proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n"})
    return write


def test_memory_is_that_of_this_machine(system, monkeypatch, tmp_path):
    monkeypatch.undo()
    installed = psutil.virtual_memory().total
    assert installed * 0.01 < machine.memory()[0] <= installed * 1.01  # less in a container
    monkeypatch.setattr(machine, "PROC", tmp_path / "none")
    assert machine.memory() == pytest.approx((installed, installed), rel=0.01)


def test_limit_of_an_outer_group_counts(system):
    system(**{
        "proc/self/cgroup": "0::/job/step\n",
        "groups/job/memory.max": 8 * GIB,
        "groups/job/memory.current": 6 * GIB,
        "groups/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",  # which the kernel can free
        "groups/job/step/memory.max": "max\n",
    })  # fmt: skip
    assert machine.memory() == (8 * GIB, 4 * GIB)


def test_first_version_of_groups_limits_too(system):
    system(**{
        "proc/self/cgroup": "5:devices:/\n4:memory:/docker/abc\n0::/\n",  # a container sees only the group at the top
        "groups/memory/memory.limit_in_bytes": 8 * GIB,
        "groups/memory/memory.usage_in_bytes": 3 * GIB,
        "groups/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    })  # fmt: skip
    assert machine.memory() == (8 * GIB, 5 * GIB)
    assert machine.killed_for_memory() == 4


def test_kills_are_those_of_the_own_group(system):
    system(**{"proc/vmstat": "oom_kill 9\n"})
    assert machine.killed_for_memory() == 9
    system(**{"proc/self/cgroup": "0::/job\n", "groups/job/memory.events": "max 3\noom 2\noom_kill 1\n"})
    assert machine.killed_for_memory() == 1
