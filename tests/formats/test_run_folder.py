import errno
import json
import os
from pathlib import Path

import pytest

from megatron_blackmamba.formats import atomic
from megatron_blackmamba.formats.run_folder import RunFolder, RunFolderError, near
from megatron_blackmamba.formats.tree import files_under

FILES = ("config.yaml", "data_plan.json", "tokenizer.json", "checkpoints/latest", "lock", "done", "requeue")


@pytest.mark.parametrize("name", FILES)
def test_folder_in_place_of_file_is_refused(tmp_path, name):
    RunFolder(tmp_path).refuse_obstacles()
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(RunFolderError, match=rf"{name}: is a folder, .*Move it away"):
        RunFolder(tmp_path).refuse_obstacles()


@pytest.mark.parametrize("name", ["checkpoints", "logs", "verified", ""])
def test_file_in_place_of_folder_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir(exist_ok=bool(name)) if name else None
    (tmp_path / "run" / name).touch() if name else (tmp_path / "run").touch()
    with pytest.raises(RunFolderError, match=rf"{name}: is not a folder, .*Move it away"):
        RunFolder(tmp_path / "run").refuse_obstacles()


def test_a_run_inside_another_run_is_refused(tmp_path):
    (tmp_path / "mine/checkpoints").mkdir(parents=True)
    (tmp_path / "mine/checkpoints/latest").write_text("step_00000001\n")
    RunFolder(tmp_path / "mine").refuse_obstacles()
    with pytest.raises(RunFolderError, match=rf"lies in the folder of another run, {tmp_path}/mine\. To resume"):
        RunFolder(tmp_path / "mine/runs/mine").refuse_obstacles()


def test_follows_links_and_survives_loops(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (tmp_path / "far/x").touch()
    (tmp_path / "a/b/up").symlink_to(tmp_path / "a")
    (tmp_path / "a/b/far").symlink_to(tmp_path / "far")
    (tmp_path / "a/gone").symlink_to("nowhere")
    (tmp_path / "a/c").touch()
    found = [path.relative_to(tmp_path).as_posix() for path in files_under(tmp_path / "a")]
    assert found == ["a/b/far/x", "a/c", "a/gone"]


def test_a_file_appears_with_all_its_content(tmp_path):
    atomic.write_json(tmp_path / "new" / "a.json", {"b": "é"})
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == {"b": "é"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_failed_write_keeps_the_old_file_only(tmp_path):
    atomic.write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), atomic.atomic_file(tmp_path / "a") as file:
        file.write(b"half of the new")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.fixture
def disk(monkeypatch):
    """Record what reaches the disk and in which order: (call, name, bytes that were in the file by then)."""
    calls, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("fsync", path.name, 0 if path.is_dir() else path.stat().st_size))
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(("rename", Path(target).name, Path(source).stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return calls


def test_content_is_on_disk_before_the_rename(tmp_path, disk):
    atomic.write_text(tmp_path / "a", "short")
    written, renamed, folder = disk
    assert written[0] == "fsync" and written[2] == 5
    assert renamed == ("rename", "a", 5)
    assert folder == ("fsync", tmp_path.name, 0)


def test_published_content_is_on_disk_before_the_rename(tmp_path, disk):
    (tmp_path / "work").write_text("whole")
    atomic.publish(tmp_path / "work", tmp_path / "a")
    assert disk == [("fsync", "work", 5), ("rename", "a", 5), ("fsync", tmp_path.name, 0)]


def test_no_descriptor_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    atomic.write_text(tmp_path / "work", "whole")
    atomic.publish(tmp_path / "work", tmp_path / "a")
    assert os.listdir("/proc/self/fd") == before


def test_folder_without_fsync_is_no_error(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(22, "this file system cannot")

    monkeypatch.setattr(os, "fsync", refuse)
    atomic.sync_folder(tmp_path)


def test_json_keeps_letters_and_is_indented(tmp_path):
    atomic.write_json(tmp_path / "a.json", {"b": ["é"]})
    assert (tmp_path / "a.json").read_text() == '{\n  "b": [\n    "é"\n  ]\n}\n'


def test_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError) as failed, atomic.atomic_file(tmp_path / "a"), open("/dev/full", "wb", 0) as full:
        full.write(b"x")
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))


def test_a_link_to_itself_is_no_folder(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert list(files_under(tmp_path)) == [tmp_path / "loop"]


def test_folder_that_was_meant_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/tiny", "runs/large"):
        (tmp_path / name).mkdir(parents=True)
    assert near(Path("tiny")) == near(Path("runs/tinny")) == "; did you mean runs/tiny?"
    assert near(Path("runs/nope")) == "; runs holds large, tiny."
    assert near(Path("nope")) == near(Path("none/nope")) == "."
