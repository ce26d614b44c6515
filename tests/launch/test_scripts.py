"""The shipped job scripts without Slurm: its commands are stand-ins that say what the test tells them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
SCRIPTS = sorted((REPOSITORY / "scripts/slurm").glob("pretrain_*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_runs_in_two_folders_do_not_wait(script):
    """Jobs of all runs have the name in the script, so they must not wait for jobs of their name."""
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert any("--job-name" in option for option in options)
    assert not any("singleton" in option for option in options)


@pytest.mark.parametrize("script", (REPOSITORY / "scripts/slurm").glob("*.sbatch"), ids=lambda script: script.name)
def test_script_without_sbatch_is_refused(script):
    env = {name: value for name, value in os.environ.items() if name not in ("SLURM_SUBMIT_DIR", "CODE")}
    done = subprocess.run([BASH, script], env=env, capture_output=True, text=True)
    assert done.returncode and done.stderr.endswith("submit this file with sbatch\n") and not done.stdout


@pytest.fixture
def start(tmp_path):
    """Start the script as job 42, while the jobs named are running; return its exit code and what it said."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in {
        "scontrol": "echo node1",
        "squeue": 'for job in $RUNNING; do case " $* " in *--jobs=$job*) echo $job;; esac; done',
        "srun": 'echo srun started; eval "${SRUN:-exit 1}"',
        "scancel": "",
    }.items():
        (commands / name).write_text(f"#!{BASH}\n{body}\n")
        (commands / name).chmod(0o755)

    def run(*running: str, **settings: str) -> subprocess.CompletedProcess:
        slurm = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node1"}
        slurm |= {
            "SLURM_SUBMIT_DIR": str(REPOSITORY),
            "RUN_FOLDER": str(tmp_path / "run"),
            "RUNNING": " ".join(running),
        }
        settings = {"PATH": f"{commands}:{os.environ['PATH']}"} | settings
        env = {**os.environ, **slurm, **settings}
        return subprocess.run([BASH, SCRIPTS[0]], env=env, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("last", ["41", "42", None])
def test_a_second_job_of_a_folder_is_refused(start, tmp_path, last):
    logs = tmp_path / "run/logs"
    logs.mkdir(parents=True)
    if last:
        (logs / "running_job").write_text(last)
    done = start("41", "42")
    if last == "41":
        assert done.returncode == 2 and "srun started" not in done.stdout
        assert f"refused: job 41 trains in {tmp_path}/run" in done.stdout
        assert (logs / "running_job").read_text() == "41"
    else:  # this job, started again, or the first one
        assert "refused" not in done.stdout and "srun started" in done.stdout
        assert (logs / "running_job").read_text() == "42\n"


def test_a_folder_whose_job_has_ended_is_free(start, tmp_path):
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/running_job").write_text("41")
    assert "srun started" in start("42").stdout


@pytest.mark.parametrize(
    "setting",
    [
        *("RESTARTS=-1", "RESTARTS=three", "STUCK_SECONDS=1.5", "GPUS_PER_NODE=all", "KEEP_EVERY=x"),
        *("WHEN_TIME_IS_UP=stop", "PREFLIGHT=no", "PREFLIGHT_SECONDS=5m"),
    ],
)
def test_odd_settings_are_refused_by_name(start, tmp_path, setting):
    name, value = setting.split("=")
    done = start(**{name: value})
    assert done.returncode == 2 and f"refused: {setting} is n" in done.stdout and "srun started" not in done.stdout
    assert done.stderr == "" and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "srun",
    [
        "exit 127",  # no such file on this node
        'while [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done; PYTHON=/nowhere/python; "${@/*python3/$PYTHON}"',
    ],
)
def test_only_plan_can_say_that_run_cannot_work(start, tmp_path, srun):
    done = start(SRUN=f'case " $* " in *" plan "*) {srun} ;; *) exit 1 ;; esac', PYTHON="python3")
    assert "the plan says" not in done.stdout and "the plan could not be checked on node1" in done.stdout
    assert "unfit: node1" in done.stdout and "requeueing job 42 without node1" in done.stdout
    assert not (tmp_path / "run/failed").exists()


RUNS_HERE = 'while [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done; "$@"'
"""What srun does with the check of the plan."""


@pytest.mark.parametrize("answers, refused", [("2 2", True), ("2 0", False), ("0", False)])
def test_two_nodes_must_agree_on_a_refusal(start, tmp_path, answers, refused):
    (tmp_path / "bin/scontrol").write_text("#!/bin/bash\nprintf 'node1\\nnode2\\n'\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nread -r code rest <{tmp_path}/codes; echo $rest >{tmp_path}/codes; exit $code\n")
    python.chmod(0o755)
    (tmp_path / "codes").write_text(f"{answers}\n")
    srun = f'case " $* " in *" plan "*) {RUNS_HERE} ;; *) exit 1 ;; esac'
    done = start(SRUN=srun, PYTHON=str(python), SLURM_NNODES="2", SLURM_NTASKS="16")
    assert ("the plan says this cannot work" in done.stdout, done.returncode) == (refused, 2 if refused else 1)
    assert ("preflight of 2 nodes" in done.stdout) is not refused
    assert (tmp_path / "run/failed").read_text() == f"job 42 ended with exit code {done.returncode}\n"


def test_node_without_srun_is_named(start, tmp_path):
    (tmp_path / "bin/srun").unlink()
    for name in ("cat", "date", "find", "hostname", "mkdir", "rm", "sed", "touch", "wc"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    done = start(PATH=str(tmp_path / "bin"))
    assert "not found on " in done.stdout and ": srun. Nothing was started" in done.stdout
    assert "the plan" not in done.stdout and "requeueing job 42" in done.stdout


def test_refused_job_keeps_marker_of_the_one_before(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/requeue").touch()
    assert "requeueing job 42" in start(SRUN="exit 1").stdout
    assert (tmp_path / "run/requeue").exists()


CHECKS = """
reports=$RUN_FOLDER/logs/42/preflight-0
case " $* " in
    *" plan "*) mkdir -p "$RUN_FOLDER/logs/42/plan"; touch "$RUN_FOLDER/logs/42/plan/works" ;;
    *" --quick "*) touch "$reports/node1.fit" ;;
    *" --all-ranks "*) echo " $* " >"$reports/call"; printf "$RANKS" | tee "$reports"/rank-{0,1}.txt >/dev/null ;;
esac
"""


def test_slow_start_of_all_ranks_blames_no_node(start):
    """The head node did not answer in time, but neither did any other rank get so far as to miss it."""
    done = start(SRUN=CHECKS, RANKS="a warning of some library\n", PREFLIGHT_SECONDS="900")
    assert "no verdict within 900 s" in done.stdout and "does Python start that slowly here?" in done.stdout
    assert "Nothing is excluded" in done.stdout and done.returncode == 1


def test_head_node_that_others_miss_is_left_out(start, tmp_path):
    done = start(SRUN=CHECKS, RANKS="rank 1 on node2 cannot reach rank 0\n", PREFLIGHT_SECONDS="900")
    assert "requeueing job 42 without node1" in done.stdout
    call = (tmp_path / "run/logs/42/preflight-0/call").read_text()
    assert " bash 900 " in call and " --limit 720 " in call


def test_lack_of_memory_ends_an_unsaved_job(start, tmp_path):
    fails = 'case " $* " in *" train "*) echo "srun: error: node1: task 3: Out Of Memory" >&2; exit 1 ;; esac'
    done = start(SRUN=CHECKS + fails, PREFLIGHT="nodes")
    assert "rank 3 was the first (Out Of Memory)" in done.stdout and "a node has too little memory" in done.stdout
    assert done.returncode == 2 and "try 2" not in done.stdout
    assert (tmp_path / "run/failed").read_text() == "job 42 ended with exit code 2\n"
    saves = 'cd "$RUN_FOLDER"; mkdir -p checkpoints; [ -e checkpoints/latest ] || echo 7 >checkpoints/latest'
    again = start(SRUN=CHECKS + fails.replace("echo", f"{saves}; echo"), PREFLIGHT="nodes")
    assert "try 2" in again.stdout and "try 3" not in again.stdout


def test_unanswered_squeue_does_not_mean_that_nothing_runs(start, tmp_path):
    """A second try beside the first one's step would be refused by the run's lock, and the job would end."""
    answers = f"read -r answer rest <{tmp_path}/answers; echo $rest >{tmp_path}/answers; case $answer in"
    (tmp_path / "answers").write_text("none 42.0 batch " * 9)
    body = f"{answers} none) exit 1 ;; *) echo ${{answer/batch/42.batch}} ;; esac"
    (tmp_path / "bin/squeue").write_text(f'#!/bin/bash\ncase " $* " in *--steps*) {body} ;; esac\n')
    (tmp_path / "bin/scancel").write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/ended\n')
    start(SRUN=f'{CHECKS}case " $* " in *" train "*) exit 1 ;; esac', PREFLIGHT="nodes", RESTARTS="1")
    assert (tmp_path / "ended").read_text() == "--signal=KILL 42.0\n" * 2


def test_damaged_checkpoint_does_not_stop_evaluations(start, tmp_path):
    for name in ("step_00000010", "step_00000010.damaged", "step_00000020"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run/checkpoints" / name / "manifest.json").touch()
    (tmp_path / "bin/sbatch").write_text("#!/bin/bash\necho 77\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    train = 'case " $* " in *" train "*) touch "$RUN_FOLDER/done" ;; esac'
    scoring = {"EVALUATE_JOB": "evaluate.sbatch", "KEEP_EVERY": "10", "WATCH_SECONDS": "1"}
    done = start(SRUN=CHECKS + train, PREFLIGHT="nodes", **scoring)
    submitted = sorted(path.stem for path in (tmp_path / "run/evaluations").glob("*.job"))
    assert submitted == ["step_00000010", "step_00000020"], done.stderr


def test_time_limit_reaches_a_step_that_just_begins(start, tmp_path):
    touch = f'#!/bin/bash\n{shutil.which("touch")} "$@"\n'
    (tmp_path / "bin/touch").write_text(touch + 'case "$*" in */logs/42/try) kill -USR1 $PPID ;; esac\n')
    (tmp_path / "bin/touch").chmod(0o755)
    saves = """import os, signal, time
def save(*_): open(os.environ["RUN_FOLDER"] + "/requeue", "w").close(); os._exit(75)
signal.signal(signal.SIGUSR1, save)
time.sleep(60)"""
    train = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(saves)}"  # it ignores the signal until it handles it
    done = start(SRUN=f'{CHECKS}case " $* " in *" train "*) {train} ;; esac', PREFLIGHT="nodes")
    assert "asking the run to save" in done.stdout and "training failed" not in done.stdout
    assert "requeueing job 42" in done.stdout


def test_what_every_node_fails_excludes_none(start, tmp_path):
    """Also what keeps srun from starting anything, such as an environment that does not reach the nodes."""
    (tmp_path / "bin/scontrol").write_text('#!/bin/bash\n[ "$1" = requeue ] || printf "node1\\nnode2\\n"\n')
    plan = f'echo "$SLURM_EXPORT_ENV" >{tmp_path}/passed; exit 2'
    done = start(SRUN=plan, SLURM_NNODES="2", SLURM_NTASKS="16", SLURM_EXPORT_ENV="NONE")
    assert "every node failed: it is not the nodes. Nothing is excluded" in done.stdout and done.returncode == 1
    assert (tmp_path / "passed").read_text() == "ALL\n"


def test_settings_of_the_site_win_over_the_file():
    file = REPOSITORY / "scripts/slurm/nccl.env"
    names = re.findall(r"^(?:\[.*\|\| )?export (\w+)=", file.read_text(), re.MULTILINE)
    assert {"NCCL_DEBUG", "NCCL_IB_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"} <= set(names)
    command = ["bash", "-euc", 'source "$1"; for name in "${@:2}"; do echo "${!name}"; done', "bash", file, *names]
    for site in ({}, dict.fromkeys(names, "site")):
        env = {"PATH": os.environ["PATH"], "LOGS": "/run/my logs", **site}
        printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
        values = dict(zip(names, printed, strict=True))
        assert set(values.values()) == {"site"} if site else values["NCCL_IB_TIMEOUT"] == "22"
        assert site or values["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/run/my logs/nccl_trace_rank_"
