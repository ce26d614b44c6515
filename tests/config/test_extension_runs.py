"""A killed run whose router has a config key of its own goes on with the same value, and with no other."""

import json

import pytest

pytestmark = pytest.mark.xdist_group("pages")  # shares its session
COUNT = "model.extensions.first_experts.count"
TRAIN = f"blackmamba train tiny name=mine model.router.kind=first_experts {COUNT}={{}} training.steps=5"
TRAIN += " training.global_batch=2 training.micro_batch=2 training.evaluate_every=0 checkpoint.every=2"
TRAIN += " checkpoint.asynchronous=false"
HERE = {"BLACKMAMBA_IMPORT": "tests.config.extension,tests.config.dies", "WHOLE_RUNS": "1"}


def test_killed_run_goes_on_with_its_own_key(session, tmp_path):
    assert session.run(TRAIN.format(3), tmp_path, **HERE).returncode != 0
    assert (tmp_path / "dead").exists()
    other = session.run(TRAIN.format(4), tmp_path, **HERE)
    assert other.returncode == 2, other.stdout
    assert f"step 2 was made with\n  {COUNT}=3, and now it is 4." in other.stdout
    missing = session.run(TRAIN.format(3), tmp_path, WHOLE_RUNS="1")
    assert missing.returncode == 2 and "name that module in BLACKMAMBA_IMPORT" in missing.stdout
    same = session.run(TRAIN.format(3), tmp_path, **HERE)
    assert same.returncode == 0, same.stdout
    assert session.run(TRAIN.format(3).replace("mine", "whole"), tmp_path, **HERE).returncode == 0
    mine, whole = (
        [json.loads(line)["loss"] for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("mine", "whole")
    )
    assert len(mine) == 5 and mine == whole
    for read in ("runs", "report runs/mine", "compare runs/mine runs/whole"):  # only records: no module is needed
        done = session.run(f"blackmamba {read}", tmp_path)
        assert done.returncode == 0, done.stdout
    planned = session.run(f"blackmamba plan tiny model.router.kind=first_experts {COUNT}=3", tmp_path, **HERE)
    assert planned.returncode == 0, planned.stdout
