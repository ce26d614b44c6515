"""What counts as damage: only that a file is not what was written."""

import json

import pytest

from megatron_blackmamba.checkpoint import CheckpointError, DamagedCheckpoint, manifest


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "tensors").write_bytes(b"1234")
    manifest.write(tmp_path, 7, {"tensors": manifest.describe(tmp_path / "tensors")}, {})
    return tmp_path


def test_files_nobody_reads_are_nobody_s_concern(checkpoint):
    (checkpoint / ".nfs000001").touch()
    assert manifest.verify(checkpoint)["step"] == 7


@pytest.mark.parametrize("content", [b"1235", b"123", None])
def test_another_content_length_or_no_file_is_damage(checkpoint, content):
    (checkpoint / "tensors").unlink()
    if content is not None:
        (checkpoint / "tensors").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="tensors"):
        manifest.verify(checkpoint)


def _of_a_later_version(folder):
    content = json.loads((folder / manifest.NAME).read_bytes())
    (folder / manifest.NAME).write_text(json.dumps({**content, "format": manifest.VERSION + 1}))


def _manifest_not_handed_out(folder):
    (folder / manifest.NAME).unlink()
    (folder / manifest.NAME).symlink_to(manifest.NAME)


def _file_not_handed_out(folder):
    (folder / "tensors").unlink()
    (folder / "tensors").symlink_to("tensors")


@pytest.mark.parametrize("change", [_of_a_later_version, _manifest_not_handed_out, _file_not_handed_out])
def test_another_format_or_a_file_system_that_fails_is_not_damage(checkpoint, change):
    change(checkpoint)
    with pytest.raises(CheckpointError) as raised:
        manifest.verify(checkpoint)
    assert not isinstance(raised.value, DamagedCheckpoint)
