"""A rank stops moving in a run on two processes; what the others leave to read."""

import json
import pickle
import re
import signal

import pytest

from tests.training.runs import ON_TWO
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("forks")
PATIENT = [*ON_TWO, "training.guard.hang_seconds=60"]
"""A busy machine must not look like a hang; the trainers below shorten the wait once there is one."""


def reports(folder):
    """Reports of a hang, by rank."""
    return {int(path.stem[5:]): path.read_text() for path in folder.glob("run/logs/hang-*/rank-*.txt")}


def heartbeat(folder, rank):
    path = folder / f"run/logs/heartbeats/rank-{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def test_rank_asleep_is_named_by_every_rank(forks, tmp_path):
    job = forks.run(tmp_path, PATIENT, trainer="Sleeping")
    assert job.wait() == [70, 70]
    for rank in (0, 1):
        said = (tmp_path / f"output_{rank}").read_text()
        assert f"rank {rank} hangs" in said and "'step 4'" in said and "take_step" in said
    assert set(reports(tmp_path)) == {0, 1}
    for rank, report in reports(tmp_path).items():
        assert re.findall(r"^rank (\d) .* has not arrived at collective \d+ of", report, re.MULTILINE) == ["1"], report
        assert f"rank {rank} hangs" in report and "Stacks of its threads" in report and "take_step" in report
    started = [collectives_started(tmp_path, rank) for rank in (0, 1)]
    assert started[0] > started[1] > 0  # rank 1 has not arrived


def collectives_started(folder, rank):
    """Read PyTorch's flight recorder."""
    (dump,) = folder.glob(f"run/logs/hang-*/flight_recorder_rank_{rank}")
    return sum(group["last_enqueued_collective"] for group in pickle.loads(dump.read_bytes())["pg_status"].values())


def test_stopped_rank_is_named_with_its_last_step(forks, tmp_path):
    job = forks.run(tmp_path, [*PATIENT, "training.tokens=1e8"], trainer="Stopped")
    wait_until(lambda: "step" in heartbeat(tmp_path, 1).get("doing", ""), job)
    job.send(signal.SIGSTOP, [1])
    (tmp_path / "hurry").touch()
    wait_until(lambda: job.ended() or 0 in job.codes)
    assert job.codes[0] == 70
    job.kill([1])
    (report,) = reports(tmp_path).values()
    named = r"^rank 1 \(.+\) is stopped, dead, or its node is gone: last seen \d+ s ago in '.*step \d+'"
    assert re.search(named, report, re.MULTILINE), report
    assert not re.search(r"^rank 0 \(", report, re.MULTILINE)


def test_each_rank_leaves_a_heartbeat(forks, tmp_path):
    job = forks.run(tmp_path, ["training.stop_after_steps=2", *ON_TWO])
    assert job.wait() == [0, 0], job.output()
    for rank in (0, 1):
        beat = heartbeat(tmp_path, rank)
        assert beat["rank"] == rank and beat["doing"] and not beat["hung"]
    assert not list(tmp_path.glob("run/logs/hang-*"))
