"""The notes by which a trunk knows its branches."""

import shutil

from megatron_blackmamba.formats import branches
from megatron_blackmamba.formats.run_folder import RunFolder


def test_branch_keeps_its_checkpoint_until_it_has_one(tmp_path):
    trunk, branch = RunFolder(tmp_path / "trunk"), RunFolder(tmp_path / "branch")
    trunk.checkpoint(8).mkdir(parents=True)
    branch.root.mkdir()
    assert branches.protect(trunk.checkpoint(8), 8, branch)
    assert branches.branches_of(trunk) == [(branch.root, 8)] and branches.needed_steps(trunk) == {8}
    branch.latest.parent.mkdir(parents=True, exist_ok=True)
    branch.latest.write_text("9")
    assert branches.needed_steps(trunk) == set() and branches.branches_of(trunk)
    branches.release(trunk.checkpoint(8), branch)
    assert not trunk.branches.exists()


def test_a_copy_of_a_checkpoint_needs_no_note(tmp_path):
    trunk, branch = RunFolder(tmp_path / "trunk"), RunFolder(tmp_path / "branch")
    trunk.checkpoint(8).mkdir(parents=True)
    copy = tmp_path / "copies/of/step_8"
    shutil.copytree(trunk.checkpoint(8), copy)
    assert branches.protect(copy, 8, branch)
    assert [*tmp_path.rglob("*.json")] == [] and branches.place_of(copy, 8) == str(copy)
    assert branches.place_of(trunk.checkpoint(8), 8) == f"{trunk.root}@8"


def test_a_note_that_cannot_be_written_is_told(tmp_path):
    trunk = RunFolder(tmp_path / "trunk")
    trunk.checkpoint(8).mkdir(parents=True)
    trunk.branches.write_text("a file where the folder of the notes should be")
    assert not branches.protect(trunk.checkpoint(8), 8, RunFolder(tmp_path / "branch"))
