import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_blackmamba.config import load
from megatron_blackmamba.evaluation.tasks import PAPER
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.launch.job import (
    JobRequest,
    LaunchError,
    job_name,
    render,
    render_evaluation,
    time_limit_s,
)

RUN = RunFolder(Path("/runs/my run"))


def options_of(script: str) -> dict[str, str]:
    """The #SBATCH options as sbatch reads them."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (shlex.split(line)[0].partition("=") for line in lines)}


def rendered(**request) -> str:
    return render(
        JobRequest(**({"nodes": 2} | request)), RUN, Path("/runs/my run/code"), Path("/runs/my run/config.yaml")
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-12", 216000), ("2-12:30", 217800), ("1-0:0:7", 86407)],
)
def test_reads_every_way_slurm_writes_a_time(text, seconds):
    assert time_limit_s(text) == seconds


@given(st.text(alphabet="0123456789:-. hm", max_size=12))
def test_a_time_is_read_or_refused_by_name(text):
    try:
        assert time_limit_s(text) >= 0
    except LaunchError as error:
        assert repr(text) in str(error)


def test_warns_in_time_however_short_the_job():
    assert JobRequest(nodes=1, time="24:00:00").warning_s == 600
    assert JobRequest(nodes=1, time="8").warning_s == 120


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"nodes": 0}, "nodes is at least 1"),
        ({"chain": 0}, "chain is at least 1"),
        ({"restarts": -1}, "restarts must be 0 or more"),
        ({"time": "soon"}, "'soon'"),
        ({"time": "0"}, 'means "unlimited" to Slurm'),
        ({"time": "1:75"}, "'1:75': minutes and seconds after a colon are at most 59"),
        ({"time": "2:60:00"}, "at most 59"),
        ({"warn_seconds": 0}, "--warn must be 1 to 65535"),
        ({"warn_seconds": 70_000, "time": "2-0"}, "--warn must be 1 to 65535"),
        ({"gpus_per_node": "-1"}, "as in h100:8"),
        ({"gpus_per_node": "0", "processes_per_node": -1}, "1 or more"),
        ({"time": "10", "warn_seconds": 600}, "is before the start"),
        ({"gpus_per_node": "8", "processes_per_node": 4}, "a GPU has one process"),
        ({"options": ("--nodes=9",)}, "Use --nodes instead"),
        ({"options": ("--array=0-3",)}, "Use --chain instead"),
        ({"options": ("--gres=nvme:1,gpu:h100:8",)}, "use --gpus-per-node instead, with a type as in h100:8"),
        ({"options": ("-t 9:00",)}, "Use --time instead"),
        ({"options": ("qos=high",)}, "begin with --"),
        ({"container": "images/none.sif"}, "images/none.sif: no such file"),
        ({"container": "none.sqsh"}, "none.sqsh: no such file"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(request_, complaint):
    with pytest.raises(LaunchError, match=complaint):
        JobRequest(**({"nodes": 2} | request_))


def test_requests_one_process_per_gpu_and_a_signal():
    options = options_of(rendered(gpus_per_node="4", time="4:00:00"))
    assert options["--ntasks-per-node"] == options["--gpus-per-node"] == "4"
    assert options["--signal"] == "B:USR1@600"
    assert options["--open-mode"] == "append"
    assert options["--dependency"] == "singleton"


def test_gpus_may_have_a_type():
    options = options_of(rendered(gpus_per_node="h100-sxm:4"))
    assert options["--gpus-per-node"] == "h100-sxm:4" and options["--ntasks-per-node"] == "4"
    scoring = render_evaluation(JobRequest(nodes=2, gpus_per_node="h100-sxm:4"), RUN, Path("/code"))
    assert options_of(scoring)["--gpus-per-node"] == "h100-sxm:1"
    assert options_of(rendered())["--gpus-per-node"] == "8"
    for wrong in ("h100", "h100:", ":8", "8:h100", "-1"):
        with pytest.raises(LaunchError, match="as in h100:8"):
            JobRequest(nodes=2, gpus_per_node=wrong)


def test_a_cpu_job_asks_for_no_gpu():
    options = options_of(rendered(gpus_per_node="0", processes_per_node=3))
    assert options["--ntasks-per-node"] == "3"
    assert "--gpus-per-node" not in options


def test_only_given_options_reach_slurm():
    plain = options_of(rendered())
    assert not {"--partition", "--account"} & set(plain)
    asked = options_of(rendered(partition="gpu", account="physics", options=("--qos=high", "--comment=two words")))
    assert {name: asked[name] for name in set(asked) - set(plain)} == {
        "--partition": "gpu",
        "--account": "physics",
        "--qos": "high",
        "--comment": "two words",
    }


def test_paths_with_spaces_survive_the_shell():
    script = rendered()
    assert options_of(script)["--output"] == "/runs/my run/logs/%j.log"
    assignments = [line for line in script.splitlines() if line.startswith(("RUN_FOLDER=", "CODE="))]
    assert [shlex.split(line) for line in assignments] == [["CODE=/runs/my run/code"], ["RUN_FOLDER=/runs/my run"]]


def test_chained_job_leaves_continuing_to_the_next():
    assert "WHEN_TIME_IS_UP=requeue" in rendered()
    assert "WHEN_TIME_IS_UP=exit" in rendered(chain=3)


@pytest.mark.parametrize(("name", "sequences"), [("1.5b", 18), ("2.8b", 22)])
def test_the_shipped_jobs_fit_the_runs_they_train(name, sequences):
    script = (Path(__file__).parents[2] / f"scripts/slurm/pretrain_{name}.sbatch").read_text()
    options = options_of(script)
    gpus = int(options["--nodes"]) * int(options["--gpus-per-node"])
    config = load(f"blackmamba_{name}")
    assert gpus * sequences == config.training.global_batch
    assert sequences % config.training.micro_batch == 0
    assert f"{sequences} sequences a GPU" in script
    # A shipped job has a fixed name, so unlike a launched one it must not wait for jobs of its name.
    assert set(options) | {"--dependency"} == set(options_of(rendered()))


@pytest.mark.parametrize(
    "changed, warned",
    [
        ({"time": "24:00"}, ["--time 24:00 is 24.0 min to Slurm; for hours, write 24:00:00"]),
        ({"time": "3"}, ["--time 3 is 3.0 min; the preflight alone may take 600 s"]),
        ({"time": "3:00:00", "warn_seconds": 5}, ["--warn 5: a step and a save must fit into 5 s"]),
        *(({"time": time}, []) for time in ("90", "1-0", "1-2:30", "24:00:00", "600:00:00")),
    ],
)
def test_times_probably_not_meant_are_remarked_on(changed, warned):
    assert list(JobRequest(nodes=1, **changed).warnings) == warned


def test_limit_is_said_in_words():
    assert JobRequest(nodes=1, time="24").limit == "24.0 min; the run is asked to save 6.0 min before it"


def test_names_reach_slurm_whole():
    """Outside of quotes a # ends the line, a quote ends the quotes, and Slurm fills in what follows a %."""
    run = RunFolder(Path('/data/50%j/a #"b"'))
    text = render(JobRequest(nodes=1, partition="p q"), run, run.root / "code", run.root / "config.yaml")
    assert '#SBATCH --output="/data/50%%j/a #\\"b\\"/logs/%j.log"\n' in text
    assert "#SBATCH --job-name=a___b_-" in text
    assert '#SBATCH --partition="p q"\n' in text


@pytest.mark.parametrize("name", ["a\ntouch x", "a\\b"])
def test_a_name_that_slurm_cannot_carry_is_refused(name):
    run = RunFolder(Path("/data") / name)
    with pytest.raises(LaunchError, match="neither backslashes nor line feeds"):
        render(JobRequest(nodes=1), run, run.root / "code", run.root / "config.yaml")


def test_equal_names_in_two_folders_do_not_wait():
    first, second = (job_name(RunFolder(Path(folder) / "tiny")) for folder in ("/a", "/b"))
    assert first != second
    assert first == job_name(RunFolder(Path("/a/tiny")))
    assert first.startswith("tiny-")


def test_a_job_name_is_short_and_plain():
    assert re.fullmatch(r"[\w.+-]{1,80}", job_name(RunFolder(Path("/runs") / ("ü,%j #'" * 40))), re.ASCII)


def test_the_job_knows_its_restarts():
    assert "RESTARTS=3\n" in rendered()
    assert "RESTARTS=0\n" in rendered(restarts=0)


def test_a_launch_with_evaluation_scores_kept_checkpoints(tmp_path):
    for task in PAPER:
        (tmp_path / f"{task}.jsonl").touch()
    request = JobRequest(nodes=2, evaluate=tmp_path, partition="gpu")
    training = render(request, RUN, Path("/code"), Path("/launch/config.yaml"), keep_every=10_000)
    assert "EVALUATE_JOB=/launch/evaluate.sbatch" in training and "KEEP_EVERY=10000" in training
    scoring = render_evaluation(request, RUN, Path("/code"))
    wanted = options_of(scoring)
    assert (wanted["--nodes"], wanted["--gpus-per-node"], wanted["--partition"]) == ("1", "1", "gpu")
    assert (wanted["--time"], wanted["--nice"]) == ("4:00:00", "10000") and "--nice" not in options_of(training)
    shorter = JobRequest(nodes=2, evaluate=tmp_path, time="90", options=("--nice=5",))
    changed = options_of(render_evaluation(shorter, RUN, Path("/code")))
    assert (changed["--time"], changed["--nice"]) == ("90", "5")  # the last of equal options counts
    assert "--dependency" not in wanted and wanted["--job-name"] != options_of(training)["--job-name"]
    assert scoring.splitlines()[-1].endswith(f'evaluate "$1" --data {tmp_path} --encoding separate')
    with pytest.raises(LaunchError, match="no such folder"):
        JobRequest(nodes=1, evaluate=tmp_path / "none")
    (tmp_path / "piqa.jsonl").rename(tmp_path / "piqa_test.parquet")
    JobRequest(nodes=1, evaluate=tmp_path)
    (tmp_path / "piqa_test.parquet").unlink()
    (tmp_path / "boolq.jsonl").unlink()
    with pytest.raises(LaunchError, match="no file for piqa, boolq"):
        JobRequest(nodes=1, evaluate=tmp_path)
