"""The folder of a study on trunks and branches: one command at a time, one set of settings, and room to grow."""

import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_blackmamba.quickstart import quickstart
from megatron_blackmamba.study import StudyError, commands
from megatron_blackmamba.study.commands import open_study, run
from megatron_blackmamba.study.execute import submit_jobs
from megatron_blackmamba.study.options import HowToRun
from megatron_blackmamba.study.points import Evidence
from megatron_blackmamba.training.keep.lock import RunInUse
from tests.docs.session import ROOT
from tests.study.test_trunks import DENSE, STUDY, study_of


def test_study_with_branches_may_grow_in_its_folder(tmp_path, monkeypatch):
    study_of(tmp_path)
    file = tmp_path / "mine.yaml"
    monkeypatch.chdir(tmp_path)
    assert open_study("mine.yaml", None).folder == tmp_path / "studies" / "mine"
    open_study(str(file), tmp_path)
    study_of(tmp_path, seeds=[1, 2])
    assert open_study(str(file), tmp_path).config.seeds == [1, 2]
    study_of(tmp_path, corpus={**STUDY["corpus"], "megabytes": 2})
    with pytest.raises(StudyError, match="belongs to another version"):
        open_study(str(file), tmp_path)


def test_finished_runs_keep_their_settings(tmp_path):
    file, shared, variants = tmp_path / "mine.yaml", STUDY["set"], STUDY["variants"]
    other = {**variants, "dense": {"small": {**DENSE, "optimizer.weight_decay": 0.7}}}
    study_of(tmp_path)
    open_study(str(file), tmp_path)
    for change, place in [
        ({"set": {**shared, "optimizer.weight_decay": 0.7}}, "set"),
        ({"set": {**shared, "training.evaluate_batches": 2}}, "set"),
        ({"variants": other}, "variants.dense.small"),
        ({"decay": 0.5}, "decay"),
    ]:
        study_of(tmp_path, **change)
        with pytest.raises(StudyError, match=f"another version of this study: {place} differs"):
            open_study(str(file), tmp_path)
    grown = {**variants, "wide": {"small": {**DENSE, "model.mlp_hidden_size": 32}}}
    study_of(tmp_path, variants=grown, set={**shared, "checkpoint.keep_last": 3})
    assert open_study(str(file), tmp_path).config.variants == grown


def test_points_of_other_settings_are_refused(tmp_path):
    study = study_of(tmp_path)
    Evidence.of(study).write(tmp_path / "points.json")
    known = Evidence.read(tmp_path / "points.json", study)
    assert known.unlike(study) is None
    decayed = {"small": {**DENSE, "optimizer.weight_decay": 0.7}}
    other = study_of(tmp_path, variants={**STUDY["variants"], "dense": decayed})
    assert known.unlike(other) == "has points of other settings than this study: variants.dense.small differs"
    assert replace(known, settings={}).unlike(other) is None  # a file of an older version


def test_second_command_in_a_folder_is_refused(tmp_path):
    study = study_of(tmp_path)
    hold = "import sys; from pathlib import Path; from megatron_blackmamba.training.keep.lock import Lock\n"
    hold += "lock = Lock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path / commands.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        holder.stdout.readline()
        with pytest.raises(RunInUse, match=rf"{tmp_path} is in use by process {holder.pid} on"):
            run(study, HowToRun())
        with pytest.raises(RunInUse):
            quickstart(tmp_path, fresh=True)
        assert (tmp_path / "mine.yaml").is_file()  # --fresh removes nothing of another command's
        holder.stdin.close()


def test_nothing_is_submitted_while_the_queue_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # without squeue
    with pytest.raises(StudyError, match="does not say what is queued"):
        submit_jobs(study_of(tmp_path).cells(), tmp_path, (), "0", "1:00:00", print)
