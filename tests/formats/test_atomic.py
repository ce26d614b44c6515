import json

import pytest

from megatron_blackmamba.formats import atomic


def test_a_file_appears_with_all_its_content(tmp_path):
    atomic.write_json(tmp_path / "new" / "a.json", {"b": "é"})
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == {"b": "é"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_an_error_midway_leaves_the_old_file_and_no_rubbish(tmp_path):
    atomic.write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), atomic.atomic_file(tmp_path / "a") as file:
        file.write(b"half of the new")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_finished_temporary_takes_its_place(tmp_path):
    (tmp_path / "work").write_text("whole")
    atomic.publish(tmp_path / "work", tmp_path / "a")
    assert (tmp_path / "a").read_text() == "whole" and not (tmp_path / "work").exists()
