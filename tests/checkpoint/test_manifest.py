"""The manifest covers every file that a reader opens, and knows the checkpoint's step."""

import json
import os

import pytest

from megatron_blackmamba.checkpoint import CheckpointError, DamagedCheckpoint, manifest

SHARD = "__0_0.distcp"


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    for name in (*manifest.SMALL, SHARD):
        (folder / name).write_bytes(b"1234")
    manifest.write(folder, 7, {path.name: manifest.describe(path) for path in folder.iterdir()}, {})
    return folder


def change(checkpoint, **content):
    path = checkpoint / manifest.NAME
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **content}))


def entries(checkpoint):
    return json.loads((checkpoint / manifest.NAME).read_bytes())["files"]


def test_files_that_nothing_reads_are_ignored(checkpoint):
    (checkpoint / ".nfs000001").touch()
    assert manifest.verify(checkpoint)["step"] == 7


@pytest.mark.parametrize("content", [b"1235", b"123", None])
@pytest.mark.parametrize("name", [SHARD, "state.json", "tokenizer.json"])
def test_changed_cut_or_missing_file_is_damage(checkpoint, name, content):
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=name):
        manifest.verify(checkpoint)


@pytest.mark.parametrize("name", [*manifest.SMALL, SHARD])
def test_dropped_entry_is_damage(checkpoint, name):
    change(checkpoint, files={other: entry for other, entry in entries(checkpoint).items() if other != name})
    with pytest.raises(DamagedCheckpoint, match=f"no entry for {name}"):
        manifest.read(checkpoint)


@pytest.mark.parametrize(
    "entry", [{}, [], None, {"bytes": 4}, {"bytes": "4", "sha256": "0" * 64}, {"bytes": 4, "sha256": "x"}]
)
def test_entry_without_size_or_hash_is_damage(checkpoint, entry):
    change(checkpoint, files={**entries(checkpoint), SHARD: entry})
    with pytest.raises(DamagedCheckpoint, match=SHARD):
        manifest.read(checkpoint)


@pytest.mark.parametrize("name", ["../step_00000006/state.json", "/etc/passwd", "..", "", "a\0b"])
def test_entry_outside_the_folder_is_damage(checkpoint, name):
    change(checkpoint, files={**entries(checkpoint), name: entries(checkpoint)[SHARD]})
    with pytest.raises(DamagedCheckpoint, match="does not describe a file"):
        manifest.read(checkpoint)


@pytest.mark.parametrize("step", [8, "7", 7.0, True, None, -1, [7]])
def test_manifest_of_another_step_is_damage(checkpoint, step):
    change(checkpoint, step=step)
    with pytest.raises(DamagedCheckpoint, match="step"):
        manifest.read(checkpoint)


@pytest.mark.parametrize("name", ["step_00000008", "step_8"])
def test_folder_renamed_to_another_step_is_refused(checkpoint, name):
    renamed = checkpoint.rename(checkpoint.with_name(name))
    with pytest.raises(DamagedCheckpoint, match=f"{name}: holds step 7 .* rename it to step_00000007"):
        manifest.read(renamed)


@pytest.mark.parametrize("name", ["best", "step_7", "step_00000007.copy"])
def test_renamed_copy_is_read(checkpoint, name):
    assert manifest.read(checkpoint.rename(checkpoint.with_name(name)))["step"] == 7


def test_name_counts_however_the_folder_is_given(checkpoint, monkeypatch):
    renamed = checkpoint.rename(checkpoint.with_name("step_00000008"))
    monkeypatch.chdir(renamed)
    with pytest.raises(DamagedCheckpoint, match="holds step 7"):
        manifest.read(type(renamed)("."))


def test_pipe_in_place_of_a_file_is_damage(checkpoint):
    (checkpoint / SHARD).unlink()
    os.mkfifo(checkpoint / SHARD)  # opened, it would wait for a writer for ever
    with pytest.raises(DamagedCheckpoint, match="not a file"):
        manifest.verify(checkpoint)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\0" * 100, b"\xff\xfe", b"null", b"[]", b"7", b"[" * 100_000, b'{"files": {}}']
)
def test_nonsense_for_a_manifest_is_damage(checkpoint, content):
    (checkpoint / manifest.NAME).write_bytes(content)
    with pytest.raises(DamagedCheckpoint) as raised:
        manifest.read(checkpoint)
    assert "\n" not in str(raised.value)


def test_missing_manifest_is_damage(checkpoint):
    (checkpoint / manifest.NAME).unlink()
    with pytest.raises(DamagedCheckpoint, match="never completed"):
        manifest.read(checkpoint)


def _of_a_later_version(folder):
    change(folder, format=manifest.VERSION + 1)


def _manifest_not_handed_out(folder):
    (folder / manifest.NAME).unlink()
    (folder / manifest.NAME).symlink_to(manifest.NAME)


def _file_not_handed_out(folder):
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(SHARD)


@pytest.mark.parametrize("fault", [_of_a_later_version, _manifest_not_handed_out, _file_not_handed_out])
def test_later_format_or_failing_disk_is_not_damage(checkpoint, fault):
    fault(checkpoint)
    with pytest.raises(CheckpointError) as raised:
        manifest.verify(checkpoint)
    assert not isinstance(raised.value, DamagedCheckpoint)


def test_each_chunk_that_is_read_is_a_move(checkpoint, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 1)
    moves = []
    files = manifest.verify(checkpoint, moved=lambda: moves.append(1))["files"]
    assert len(moves) == sum(entry["bytes"] for entry in files.values())


def test_ranks_share_the_reading_between_them(checkpoint):
    for name in (SHARD, "common.pt"):
        (checkpoint / name).write_bytes(b"4321")
    found = []
    for part in range(4):
        try:
            manifest.verify(checkpoint, part, 4)
        except DamagedCheckpoint as error:
            found.append(str(error))
    assert len(found) == 2 and SHARD in "".join(found) and "common.pt" in "".join(found)
