"""Whatever is in a checkpoint, reading it runs no code and fails in one line."""

import io
import json
import os
import pickle
import random
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as FORMAT
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_blackmamba.checkpoint import CheckpointError, CheckpointReader, DamagedCheckpoint, manifest, safety
from tests.checkpoint.files import replace_file


class Asks:
    """An object that pickles as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def table(folder, entry):
    (folder / safety.METADATA).write_bytes(pickle.dumps(Metadata(state_dict_metadata={"weight": entry})))
    return folder


def test_enum_members_are_read_however_pickled(tmp_path):
    as_debian_12_does = table(tmp_path, Asks(getattr, FORMAT, "TORCH_PRESERVE_FORMAT"))
    assert safety.read_table(as_debian_12_does).state_dict_metadata["weight"] is FORMAT.TORCH_PRESERVE_FORMAT
    assert safety.read_table(table(tmp_path, FORMAT.TORCH_CHANNELS_LAST)).state_dict_metadata  # as this one does


def test_paths_are_read_whichever_python_wrote_them():
    for module in (b"pathlib", b"pathlib._local"):  # the second is that of Python 3.13
        pickled = io.BytesIO(b"c" + module + b"\nPosixPath\n(Vfolder\ntR.")
        assert safety._TableOnly(pickled).load() == PosixPath("folder")


@pytest.mark.parametrize("name", ["__reduce__", "__class__", "mro", "_member_map_"])
def test_only_members_of_enums_are_reached_by_name(tmp_path, name):
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        safety.read_table(table(tmp_path, Asks(getattr, FORMAT, name)))


def test_members_are_taken_from_enums_alone(tmp_path):
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        safety.read_table(table(tmp_path, Asks(getattr, (), "count")))


def test_function_in_a_table_is_refused_unrun(tmp_path):
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        safety.read_table(table(tmp_path, Asks(os.mkdir, str(tmp_path / "ran"))))
    assert not (tmp_path / "ran").exists()


def refused(run, checkpoints, why=""):
    """Both ways of reading refuse the checkpoint in one line; return it."""
    with pytest.raises(CheckpointError, match=why) as raised:
        CheckpointReader(run.root)
    assert "\n" not in str(raised.value) and str(run.checkpoint(7)) in str(raised.value)
    with pytest.raises(CheckpointError):
        found = checkpoints()
        found.newest()
        found.state(7)
    return raised.value


def edited_table(change):
    def edit(content):
        loaded = pickle.loads(content)
        change(loaded)
        return pickle.dumps(loaded)

    return edit


def elsewhere(loaded):
    for place in loaded.storage_data.values():
        place.relative_path = "../../../other/__0_0.distcp"


def pickled(value):
    return pickle.dumps(value, 2)


NONSENSE = {"nothing": b"", "zeros": b"\0" * 5000, "text": b"hello", "a number": pickled(7), "a table": pickled({})}
TABLES = {
    "objects": edited_table(lambda loaded: loaded.state_dict_metadata.update(weight=BytesStorageMetadata())),
    "a number for names": edited_table(lambda loaded: setattr(loaded, "state_dict_metadata", 7)),
    "a number for places": edited_table(lambda loaded: setattr(loaded, "storage_data", 7)),
    "no places": edited_table(lambda loaded: loaded.storage_data.clear()),
    "other places": edited_table(elsewhere),
    **{name: lambda _, content=content: content for name, content in NONSENSE.items()},
}


@pytest.mark.parametrize("name", TABLES)
def test_nonsense_table_is_refused(run, checkpoints, name):
    path = run.checkpoint(7) / safety.METADATA
    replace_file(run.checkpoint(7), safety.METADATA, TABLES[name](path.read_bytes()))
    refused(run, checkpoints, r"\.metadata|not tensors")


def torch_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("content", [*NONSENSE.values(), torch_file([1, 2]), torch_file(None)])
def test_nonsense_values_are_refused(run, checkpoints, content):
    replace_file(run.checkpoint(7), "common.pt", content)
    refused(run, checkpoints, r"common\.pt: refused")


def test_function_in_the_values_is_refused_unrun(run, checkpoints, tmp_path):
    replace_file(run.checkpoint(7), "common.pt", torch_file(Asks(os.mkdir, str(tmp_path / "ran"))))
    refused(run, checkpoints, r"common\.pt: refused")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\0\0", b"\xff", b"[" * 100_000, b'{"a": 1}'])
@pytest.mark.parametrize("name", ["state.json", "metadata.json"])
def test_nonsense_json_is_refused(run, checkpoints, name, content):
    replace_file(run.checkpoint(7), name, content)
    refused(run, checkpoints, f"{name}: refused")


def test_nonsense_config_is_refused_by_key(run, checkpoints):
    state = json.loads((run.checkpoint(7) / "state.json").read_bytes())
    state["config"]["model"]["hidden_size"] = "wide"
    replace_file(run.checkpoint(7), "state.json", json.dumps(state).encode())
    with pytest.raises(CheckpointError, match=r"state\.json: model\.hidden_size='wide': "):
        CheckpointReader(run.root)


@pytest.mark.parametrize("lost", ["config", "progress", "guard", "data"])
def test_state_without_a_part_is_refused_on_resume(run, checkpoints, lost):
    state = json.loads((run.checkpoint(7) / "state.json").read_bytes())
    del state[lost]
    replace_file(run.checkpoint(7), "state.json", json.dumps(state).encode())
    with pytest.raises(CheckpointError, match=f"it has no {lost}"):
        checkpoints().state(7)


def test_state_of_another_step_is_refused(run, checkpoints):
    state = json.loads((run.checkpoint(7) / "state.json").read_bytes())
    state["progress"]["step"] = 6
    replace_file(run.checkpoint(7), "state.json", json.dumps(state).encode())
    with pytest.raises(CheckpointError, match="step 6"):
        checkpoints().state(7)


@pytest.mark.parametrize("name", ["common.pt", "state.json", ".metadata", "metadata.json", "manifest.json"])
def test_missing_or_unreadable_files_are_named(run, checkpoints, name):
    path = run.checkpoint(7) / name
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json|missing|not a checkpoint|not a complete"):
        checkpoints().newest()
    path.symlink_to(name)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints().newest()


def shard(run):
    return next(run.checkpoint(7).glob("*.distcp"))


def test_missing_or_cut_shard_is_named_before_loading(run):
    path = shard(run)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpoint, match=rf"{path.name}: {len(whole) - 1:,} bytes, its manifest says"):
        CheckpointReader(run.root)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"{path.name}: missing"):
        CheckpointReader(run.root)


def test_shard_that_cannot_be_read_is_named(run):
    """Of the right size, so that only reading a weight finds it."""
    path = shard(run)
    path.write_bytes(b"\0" * path.stat().st_size)
    reader = CheckpointReader(run.root)
    with pytest.raises(DamagedCheckpoint, match=rf"{path.name}: its content changed"):
        for _ in reader.tensors():
            pass


def test_complete_run_s_removed_checkpoints_are_named(run):
    run.config.touch()
    (run.root / "checkpoints").rename(run.root / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="has not saved a checkpoint yet"):
        CheckpointReader(run.root)
    run.done.touch()
    with pytest.raises(DamagedCheckpoint, match="this run is complete, but its checkpoints were removed"):
        CheckpointReader(run.root)


def test_flipped_bytes_never_end_in_a_traceback(run):
    """Each small file is damaged in 60 ways, and the manifest says that this is right."""
    chance = random.Random(7)
    whole = {name: (run.checkpoint(7) / name).read_bytes() for name in manifest.REQUIRED}
    for name, content in whole.items():
        for _ in range(60):
            changed = bytearray(content[: chance.randrange(len(content))] if chance.random() < 0.3 else content)
            for _ in range(min(chance.randrange(1, 9), len(changed))):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            replace_file(run.checkpoint(7), name, bytes(changed))
            try:
                CheckpointReader(run.checkpoint(7))
            except CheckpointError as error:
                assert "\n" not in str(error), error
        replace_file(run.checkpoint(7), name, content)
    assert CheckpointReader(run.root).step == 7


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\0" * 20, b"\xff\xfe", b"../../other", b"step_1/../..", b"/etc", b"x" * 5000, b"step_"]
)
def test_latest_that_names_no_checkpoint_is_refused(run, content):
    run.latest.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="does not name a checkpoint") as raised:
        CheckpointReader(run.root)
    assert "\n" not in str(raised.value)


def test_latest_that_names_a_missing_checkpoint_is_refused(run):
    run.latest.write_text("step_00000009\n")
    with pytest.raises(DamagedCheckpoint, match="names step_00000009, which is not a complete checkpoint"):
        CheckpointReader(run.root)
