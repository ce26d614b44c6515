import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_blackmamba.cli.errors import may_pass
from megatron_blackmamba.training.keep.lock import Lock, RunInUse

ROOT = Path(__file__).resolve().parents[2]
HOLD = "import sys, time; from pathlib import Path; from megatron_blackmamba.training.keep.lock import Lock\n"


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock, and a child of it that lives on."""
    program = HOLD + (
        "lock = Lock(Path(sys.argv[1]))\n"
        "import os\n"
        "if os.fork() == 0: time.sleep(600); os._exit(0)\n"
        "print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdout.readline()
    yield process
    os.killpg(process.pid, 9)
    process.wait()


def test_second_job_in_a_folder_names_the_first(tmp_path, holder):
    with pytest.raises(RunInUse, match=rf"process {holder.pid} on "):
        Lock(tmp_path / "lock")


def test_job_waits_for_lock_of_lost_node(tmp_path, holder):
    with pytest.raises(RunInUse) as refused:
        Lock(tmp_path / "lock")
    assert may_pass(refused.value)  # so its exit code is 1, after which a job tries again


def test_killed_job_releases_its_lock_despite_live_writers(tmp_path, holder):
    holder.kill()
    holder.wait()
    Lock(tmp_path / "lock").release()


def test_a_lock_given_back_can_be_taken_again(tmp_path):
    for _ in range(2):
        Lock(tmp_path / "run" / "lock").release()


def test_a_launcher_is_refused_while_a_rank_trains(tmp_path, holder):
    with pytest.raises(RunInUse, match=rf"process {holder.pid} on "):
        Lock(tmp_path / "lock", launcher=True)
