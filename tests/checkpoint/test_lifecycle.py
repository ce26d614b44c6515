"""Tests of `Checkpoints`: what it keeps, publishes and refuses, on a real model in this process."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron_blackmamba.checkpoint import (
    CheckpointError,
    DamagedCheckpoint,
    NotFiniteError,
    SaveError,
    common,
    manifest,
    sharded,
)
from megatron_blackmamba.checkpoint.lifecycle import Checkpoints
from megatron_blackmamba.config import load
from megatron_blackmamba.formats.evaluations import claim
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.model import build
from megatron_blackmamba.training.step.optimizer import make_trainable
from tests.checkpoint.conftest import SMALL, STATE
from tests.checkpoint.files import replace_file

from megatron.core.dist_checkpointing.strategies import filesystem_async


def state(step):
    return {"config": {}, **STATE, "progress": {"step": step}}


def save(checkpoints, step):
    checkpoints.save(step, state(step))
    return checkpoints.finish(wait=True)


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.checkpoints.iterdir())


def damage(checkpoints, step, name="common.pt"):
    path = checkpoints.folder.checkpoint(step) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_weights_from_nowhere_are_refused(checkpoints, tmp_path):
    """Rank 0 looks for the checkpoint, and every rank raises what it finds wrong."""
    with pytest.raises(CheckpointError, match="nowhere"):
        checkpoints().load_weights(tmp_path / "nowhere")


def test_old_checkpoints_are_removed_but_milestones_stay(checkpoints):
    made = checkpoints("checkpoint.keep_last=2", "checkpoint.keep_every=3")
    for step in range(1, 8):
        assert save(made, step) == [step]
    assert names(made) == ["latest", "step_00000003", "step_00000006", "step_00000007"]
    assert made.folder.latest.read_text() == "step_00000007\n" and made.newest() == 7


def test_checkpoint_that_cannot_be_removed_keeps_no_others(checkpoints, monkeypatch):
    made, rename = checkpoints("checkpoint.keep_last=1", "checkpoint.keep_every=0"), os.rename

    def refuse_first(old, new):
        if Path(old).name == "step_00000001":
            raise OSError(errno.EBUSY, "Device or resource busy", str(old))
        rename(old, new)

    monkeypatch.setattr(os, "rename", refuse_first)
    for step in range(1, 5):
        save(made, step)
    assert made.steps() == [1, 4]
    assert len(made.said) == 3 and all("busy" in line for line in made.said)


def test_load_moves_latest_that_a_killed_save_left(checkpoints):
    made = checkpoints()
    for step in (1, 2):
        save(made, step)
    made.folder.latest.write_text("step_00000001\n")
    made.load(made.newest())
    assert made.folder.latest.read_text() == "step_00000002\n"


def test_a_checkpoint_that_is_being_scored_is_kept(checkpoints):
    made = checkpoints("checkpoint.keep_last=1", "checkpoint.keep_every=0")
    save(made, 1)
    with claim(made.folder.root, 1):
        save(made, 2)
        assert made.steps() == [1, 2]
    save(made, 3)
    assert made.steps() == [3]


def test_what_is_saved_is_loaded_bit_for_bit(checkpoints, trainable):
    made = checkpoints()
    before = {name: weight.clone() for name, weight in trainable.model.state_dict().items() if weight is not None}
    save(made, 3)
    with torch.no_grad():
        for weight in trainable.model.parameters():
            weight.zero_()
    made.load(3)
    assert all(
        torch.equal(weight, before[name]) for name, weight in trainable.model.state_dict().items() if name in before
    )
    assert made.state(3) == state(3)


def test_each_tensor_read_is_a_sign_of_life(checkpoints):
    made, heard = checkpoints(), []
    save(made, 3)
    made.alive = heard.append
    made.load(3)
    assert heard.count("loading step 3") > 10


def test_save_starts_no_server_nor_takes_the_queue(checkpoints):
    """megatron-core would start a process for results; its own saves in this process need that."""
    save(checkpoints(), 1)
    assert not any("Manager" in child.name for child in multiprocessing.active_children())
    assert filesystem_async._results_queue is None


def test_optimizer_without_a_step_is_saved_as_fresh(place, tmp_path):
    """As when every step so far was skipped."""
    config = load("tiny", [*SMALL, f"folder={tmp_path}"])
    weights = []
    for saved in (False, True):
        made = make_trainable(config, build(config, place), place)
        if saved:
            checkpoints = Checkpoints(RunFolder(tmp_path / "run"), config, place, made.model, made.optimizer)
            assert save(checkpoints, 1) == [1]
            checkpoints.load(1)
        for weight in made.model.parameters():
            weight.main_grad.fill_(0.01)
        made.optimizer.step()
        weights.append(torch.cat([weight.detach().flatten().float() for weight in made.model.parameters()]))
    assert torch.equal(*weights)


@pytest.fixture
def calls(monkeypatch):
    """Names of files and folders as they are synced and renamed, in order; sizes as they are when synced."""
    seen = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def name(path):
        return "/".join(Path(path).parts[-2:])

    def synced(file):
        seen.append(("sync", name(os.readlink(f"/proc/self/fd/{file}")), os.fstat(file).st_size))
        fsync(file)

    def renamed(call):
        def wrapped(old, new, **more):
            seen.append(("rename", name(new), None))
            call(old, new, **more)

        return wrapped

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed(rename))
    monkeypatch.setattr(os, "replace", renamed(replace))
    monkeypatch.setattr(Path, "rename", lambda old, new: os.rename(old, new))  # Python 3.10's keeps its own functions
    monkeypatch.setattr(Path, "replace", lambda old, new: os.replace(old, new))
    return seen


def test_manifest_then_folder_then_latest_reach_the_disk(checkpoints, calls):
    save(checkpoints(), 4)
    order = [(what, where) for what, where, _ in calls]
    hidden, final = "checkpoints/.step_00000004", "checkpoints/step_00000004"
    steps = [
        ("rename", ".step_00000004/.metadata"),
        ("rename", ".step_00000004/state.json"),
        ("rename", ".step_00000004/manifest.json"),
        ("sync", hidden),
        ("rename", final),
        ("sync", "run/checkpoints"),
        ("rename", "checkpoints/latest"),
        ("sync", "run/checkpoints"),
    ]
    at = -1
    for step in steps:
        at = order.index(step, at + 1)  # after the one before
    assert order.index(("rename", "checkpoints/latest")) > order.index(("sync", "run/checkpoints"))
    inside = [index for index, (_, where) in enumerate(order) if where.startswith(".step_00000004/")]
    assert "manifest.json" in order[max(inside)][1]


def test_two_saves_of_a_step_leave_the_second(checkpoints):
    made = checkpoints()
    save(made, 1)
    made.folder.latest.unlink()
    made.folder.latest.mkdir()  # cannot be replaced by a file
    (made.folder.latest / "inside").touch()
    with pytest.raises(SaveError, match="step 2: publish"):
        save(made, 2)
    assert made.steps() == [1, 2]
    (made.folder.latest / "inside").unlink()
    made.folder.latest.rmdir()
    assert save(made, 2) == [2]
    assert made.steps() == [1, 2] and made.newest() == 2
    save(made, 3)
    assert names(made) == ["latest", "step_00000001", "step_00000002", "step_00000003"]


def test_failed_replacement_keeps_the_first_save(checkpoints, monkeypatch):
    made, rename = checkpoints("checkpoint.keep_last=1"), os.rename
    save(made, 1)

    def fails(old, new):
        if Path(old) == made._partial(1):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(SaveError, match="step 1: publish"):
        save(made, 1)
    monkeypatch.undo()
    assert names(made) == ["latest", "step_00000001"] and made.newest() == 1


@pytest.mark.parametrize("first", ["newest", "save"])
def test_checkpoint_comes_back_after_a_kill(checkpoints, first):
    """As the end of a process between the two renames of a replacement leaves it."""
    made = checkpoints()
    save(made, 1)
    made.folder.checkpoint(1).rename(made.folder.checkpoints / ".step_00000001.replaced")
    made.newest() if first == "newest" else save(made, 2)
    assert made.steps()[0] == 1


def test_left_overs_are_removed_by_the_next_save(checkpoints):
    made = checkpoints()
    for name in (".step_00000001", ".step_00000002.removed"):
        (made.folder.checkpoints / name).mkdir(parents=True)
        (made.folder.checkpoints / name / "shard").touch()
    save(made, 3)
    assert names(made) == ["latest", "step_00000003"]


@pytest.mark.parametrize(
    "fails", [(common, "write"), (manifest, "write"), (filesystem_async.FileSystemWriterAsync, "write_preloaded_data")]
)
def test_a_failed_save_leaves_no_files(checkpoints, monkeypatch, fails):
    made = checkpoints()
    save(made, 1)

    def full(*ignored):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*fails, full)
    with pytest.raises(SaveError, match="No space left"):
        save(made, 2)
    assert names(made) == ["latest", "step_00000001"]


def test_size_is_that_of_the_newest_checkpoint(checkpoints):
    made = checkpoints()
    assert made.size() == 0  # there is none, and none was begun
    for step in (1, 2):
        save(made, step)
        newest = made.folder.checkpoint(step)
        (newest / "note").write_bytes(bytes(1000 * step))
        assert made.size() == sum(file.stat().st_size for file in newest.iterdir()) > 1000 * step


def test_save_without_space_for_it_is_refused(checkpoints):
    made = checkpoints()
    save(made, 1)
    os.truncate(made.folder.checkpoint(1) / "common.pt", 1 << 42)  # sparse: 4 TiB that take no space
    with pytest.raises(SaveError, match="as large as the newest does not fit"):
        made.save(2, state(2))
    assert names(made) == ["latest", "step_00000001"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_never_published(checkpoints, trainable, value):
    made = checkpoints()
    save(made, 1)
    bias = trainable.model.decoder.final_layernorm.bias
    with torch.no_grad():
        kept, bias[3] = bias[3].item(), value
        try:
            with pytest.raises(NotFiniteError, match=r"step 2: decoder\.final_layernorm\.bias is not finite on rank 0"):
                save(made, 2)
        finally:
            bias[3] = kept
    assert made.steps() == [1] and save(made, 3) == [3]


def test_non_finite_optimizer_state_is_never_published(checkpoints, trainable):
    made = checkpoints()
    states = next(part for part in trainable.optimizer.chained_optimizers).optimizer.state
    moment = next(iter(states.values()))["exp_avg"]
    kept = moment.clone()
    moment.view(-1)[0] = torch.nan
    try:
        with pytest.raises(NotFiniteError, match="exp_avg"):
            save(made, 2)
    finally:
        moment.copy_(kept)
    assert made.steps() == []


def test_training_continues_while_the_writer_writes(checkpoints):
    made = checkpoints()
    made.save(5, state(5))
    writer = made.write._process.pid
    os.kill(writer, signal.SIGSTOP)
    assert made.finish(wait=False) == [] and made.steps() == []
    os.kill(writer, signal.SIGTERM)  # as Slurm sends it to every process of a step
    os.kill(writer, signal.SIGCONT)
    assert made.finish(wait=True) == [5] and made.finish(wait=True) == []


def test_damaged_checkpoint_is_set_aside(checkpoints):
    made = checkpoints()
    for step in (1, 2, 3):
        save(made, step)
    damage(made, 3)
    (made.folder.checkpoints / "step_00000003.damaged" / "older").mkdir(parents=True)
    assert made.newest() == 2
    assert names(made) == ["latest", "step_00000001", "step_00000002", "step_00000003.damaged"]
    assert made.folder.latest.read_text() == "step_00000002\n"
    assert len(made.said) == 1 and "step_00000003.damaged" in made.said[0] and "common.pt" in made.said[0]


def test_damage_stops_the_run_if_asked(checkpoints):
    made = checkpoints("checkpoint.if_damaged=stop")
    for step in (1, 2):
        save(made, step)
    damage(made, 2)
    with pytest.raises(DamagedCheckpoint, match=r"common\.pt.*checkpoint\.if_damaged=older"):
        made.newest()
    assert made.steps() == [1, 2]


def test_no_whole_checkpoint_stops_the_run(checkpoints):
    made = checkpoints()
    assert made.newest() is None
    save(made, 1)
    damage(made, 1)
    with pytest.raises(DamagedCheckpoint, match="every checkpoint in"):
        made.newest()


@pytest.mark.parametrize("latest", ["step_00000002", "", "\0" * 14, None])
def test_run_whose_checkpoints_are_gone_never_starts_over(checkpoints, latest):
    made = checkpoints()
    for step in (1, 2):
        save(made, step)
    line = {"time": "2026-11-22T10:00:00+00:00", "kind": "saved", "step": 2}
    made.folder.events.write_text(json.dumps(line) + "\n")
    for step in (1, 2):
        shutil.rmtree(made.folder.checkpoint(step))
    made.folder.latest.unlink() if latest is None else made.folder.latest.write_text(latest)
    with pytest.raises(CheckpointError, match="step_00000002 was saved and is gone, and no other checkpoint is left"):
        made.newest()


def test_last_checkpoint_that_is_gone_is_reported(checkpoints):
    made = checkpoints()
    for step in (1, 2):
        save(made, step)
    assert made.newest() == 2 and made.said == []
    shutil.rmtree(made.folder.checkpoint(2))
    assert made.newest() == 1
    assert len(made.said) == 1 and f"{made.folder.checkpoint(2)} was saved and is gone" in made.said[0]


def test_start_from_damaged_weights_is_refused(run, checkpoints, tmp_path):
    made = checkpoints(folder=tmp_path / "new")
    made.load_weights(run.root)
    shard = next(run.checkpoint(7).glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for path in (run.root, run.checkpoints, run.checkpoint(7)):
        with pytest.raises(DamagedCheckpoint, match=shard.name):
            made.load_weights(path)


@pytest.mark.parametrize("read", [sharded.load, sharded.load_weights])
def test_checkpoint_without_some_weights_is_refused_in_words(saved, place, read):
    config = load("tiny", [*SMALL, "model.pattern=MEMEMM"])
    more = make_trainable(config, build(config, place), place)
    with pytest.raises(CheckpointError, match=r"step_00000007: refused: lacks [\w., ]+ and \d+ more of the model"):
        read(saved.checkpoint(7), more.model, more.optimizer)


def test_checkpoint_with_more_weights_is_refused_in_words(saved, place):
    config = load("tiny", [*SMALL, "model.pattern=M"])
    less = make_trainable(config, build(config, place), place)
    with pytest.raises(CheckpointError, match=r"step_00000007: refused: holds [\w., ]+ and \d+ more, which the"):
        sharded.load(saved.checkpoint(7), less.model, less.optimizer)


@pytest.mark.parametrize("read", [sharded.load, sharded.load_weights])
def test_checkpoint_of_other_shapes_is_refused_in_words(saved, place, read):
    config = load("tiny", [*SMALL, "model.expert_hidden_size=48"])
    wider = make_trainable(config, build(config, place), place)
    with pytest.raises(
        CheckpointError, match=r"refused: holds [\w.]+ as \[[\d, ]+\] instead of \[[\d, ]+\].* No layout"
    ):
        read(saved.checkpoint(7), wider.model, wider.optimizer)


def test_start_from_weights_with_code_is_refused(run, checkpoints, tmp_path):
    replace_file(run.checkpoint(7), manifest.TABLE, pickle.dumps(os.getcwd))
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        checkpoints(folder=tmp_path / "new").load_weights(run.root)


def test_start_from_a_renamed_copy_works(run, checkpoints, tmp_path):
    run.checkpoint(7).rename(tmp_path / "best")
    checkpoints(folder=tmp_path / "new").load_weights(tmp_path / "best")
    (tmp_path / "best").rename(tmp_path / "step_00000008")
    with pytest.raises(DamagedCheckpoint, match="rename it to step_00000007"):
        checkpoints(folder=tmp_path / "new").load_weights(tmp_path / "step_00000008")


def test_only_folders_of_steps_are_checkpoints(checkpoints):
    made = checkpoints()
    save(made, 2)
    for name in ("step_3", "step_00000004.damaged", "step_0000000\N{ARABIC-INDIC DIGIT THREE}", "notes"):
        (made.folder.checkpoints / name).mkdir()
    (made.folder.checkpoints / "step_00000009").touch()
    assert made.steps() == [2] and save(made, 5) == [5] and made.newest() == 5
