import os
import subprocess
import sys
import threading
import time

from megatron_blackmamba.runtime import hangs
from megatron_blackmamba.runtime.hangs import Beat, Heartbeats, Seen


def seen(rank, started, age=1.0, **group):
    group = {"group": "DATA", "ranks": [0, 1, 2, 3], "started": started} | group
    beat = Beat(rank, f"node{rank}", "1", "step 120", 600.0, "data/batches.py:88 __next__", True, {"7": group})
    return Seen(beat, age)


def is_alive(each):
    return each.age < 300


def test_ranks_behind_silent_or_absent_are_named():
    beats = {0: seen(0, 57), 1: seen(1, 56), 3: seen(3, 57, age=612)}
    named = hangs.missing(beats, 4, is_alive)
    assert list(named) == [1, 2, 3]
    assert named[1].startswith("rank 1 (node1) has not arrived at collective 57 of DATA (ranks 0-3; it started 56)")
    assert "rank 2 has left no heartbeat" in named[2]
    assert "last seen 612 s ago in 'step 120'" in named[3] and "data/batches.py:88" in named[3]


def test_nobody_is_blamed_when_all_arrived():
    beats = {rank: seen(rank, 57) for rank in range(4)}
    assert hangs.missing(beats, 4, is_alive) == {}
    assert hangs.describe(beats, 4, is_alive).startswith("every rank has started the same collectives")


def test_no_live_rank_is_compared_with_stopped_one():
    """A rank that stops with collectives under way keeps the others from starting their next."""
    beats = {0: seen(0, 55), 1: seen(1, 55), 2: seen(2, 57, age=612)}
    assert list(hangs.missing(beats, 3, is_alive)) == [2]


def test_heartbeats_of_an_earlier_start_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    Heartbeats(tmp_path, 1, 2, 60).write("step 7", 0.0)
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    now = Heartbeats(tmp_path, 0, 2, 60)
    now.write("step 8", 0.0)
    assert list(now.read()) == [0]
    assert now.read()[0].beat.at.startswith(("runtime/", "/")) and "test_heartbeats" not in now.read()[0].beat.doing


def test_reports_of_earlier_hangs_are_ignored(tmp_path):
    beats = Heartbeats(tmp_path, 0, 2, 60)
    beats.reports.mkdir()
    os.utime(beats.reports, (time.time() - 100,) * 2)
    beats.write("step 1", 0.0)
    assert not beats.another_hangs()
    os.utime(beats.reports, (time.time() + 100,) * 2)
    assert beats.another_hangs()


def test_no_report_returns_before_live_ranks_reported(tmp_path):
    beats, other = Heartbeats(tmp_path, 0, 3, 600), Heartbeats(tmp_path, 1, 3, 600)
    other.write("step 4", 0.0)  # alive; rank 2 never started, and is not waited for
    report = threading.Thread(target=hangs.write_report, args=(beats, "rank 0 hangs", "step 4", 60.0), daemon=True)
    report.start()
    report.join(1)
    assert report.is_alive() and not beats.report(0).exists()
    assert other.another_hangs()
    other.write("step 4", 60.0, hung=True)
    while not beats.report(0).exists():
        assert report.is_alive()
        time.sleep(0.05)
    report.join(1)
    assert report.is_alive()  # rank 1's report is still to come
    other.report(1).write_text("rank 1")
    report.join(600)
    assert not report.is_alive()
    assert "rank 2 has left no heartbeat" in beats.report(0).read_text()


def test_hang_is_announced_despite_older_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "dump_flight_recorder", lambda *_: None)
    beats, other = Heartbeats(tmp_path, 0, 2, 600), Heartbeats(tmp_path, 1, 2, 600)
    other.write("step 4", 0.0)
    beats.reports.mkdir()
    other.report(1).write_text("rank 1")
    for path in (other.report(1), beats.reports):
        os.utime(path, (time.time() - 100,) * 2)
    report = threading.Thread(target=hangs.write_report, args=(beats, "rank 0 hangs", "step 4", 60.0), daemon=True)
    report.start()
    while not (0 in other.read() and other.read()[0].beat.hung):
        assert report.is_alive()
        time.sleep(0.01)
    assert other.another_hangs()
    other.write("step 4", 60.0, hung=True)
    report.join(1)
    assert report.is_alive()  # rank 1's report is of an earlier hang
    other.report(1).write_text("rank 1")
    report.join(600)
    assert not report.is_alive()


def test_damaged_heartbeat_does_not_hide_the_others(tmp_path):
    beats = Heartbeats(tmp_path, 0, 3, 60)
    beats.write("step 1", 0.0)
    (beats.folder / "rank-1.json").write_text('{"rank": 1')
    assert list(beats.read()) == [0]


def test_the_flight_recorder_is_on_unless_set():
    environment: dict[str, str] = {}
    hangs.record_collectives(environment)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "2000"
    environment["TORCH_FR_BUFFER_SIZE"] = "0"
    hangs.record_collectives(environment)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "0"


def test_processes_without_torch_dump_no_flight_recorder(tmp_path):
    program = "import sys; from pathlib import Path; from megatron_blackmamba.runtime import hangs;"
    program += " hangs.dump_flight_recorder(Path(sys.argv[1]), 0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    assert list(tmp_path.iterdir()) == []


def test_ranks_beat_several_times_within_their_patience(tmp_path):
    assert Heartbeats(tmp_path, 0, 2, 16).every == 2
    assert Heartbeats(tmp_path, 0, 2, 6000).every == hangs.LONGEST_BEAT_S
