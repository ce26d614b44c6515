"""A folder that appears whole is also on the disk: its contents before the rename, its name after it."""

import os

from megatron_blackmamba.interchange import folder


def test_contents_are_synced_before_the_rename_and_the_name_after_it(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(folder, "sync_folder", lambda path: synced.append((path, os.listdir(tmp_path))))
    with folder.new_folder(tmp_path / "out") as temporary:
        (temporary / "part").mkdir()
    before, after = [temporary.name], ["out"]
    assert synced == [(temporary, before), (temporary / "part", before), (tmp_path, after)]
