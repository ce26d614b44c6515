"""The raw file that a user names, among those that a run's shards were made from."""

import pytest

from megatron_blackmamba.data_tools.provenance import source_called
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.remote import file_sha256
from megatron_blackmamba.formats.shards import SourceFile


@pytest.fixture
def files(tmp_path):
    """Return files by folder and the sources of their shards; one and two have equal names and sizes."""
    paths, sources = {}, {}
    for folder, text in {"one": "a", "two": "b", "three": "longer", "copy": "a", "other": "z"}.items():
        paths[folder] = tmp_path / folder / "0.jsonl"
        paths[folder].parent.mkdir()
        paths[folder].write_text(text)
        sources[folder] = SourceFile(
            name="0.jsonl", sha256=file_sha256(paths[folder]), bytes=len(text), records=1, documents=1
        )
    return paths, sources


@pytest.mark.parametrize("folder", ["one", "two", "three"])
def test_path_finds_its_own_file_among_equal_names(files, folder):
    paths, sources = files
    trained = [sources[name] for name in ("one", "two", "three")]
    assert source_called(str(paths[folder]), trained) == sources[folder]


def test_name_of_several_files_is_refused(files):
    _, sources = files
    for name in ("0.jsonl", "moved/0.jsonl"):
        with pytest.raises(InputError, match="made from 2 files of this name"):
            source_called(name, [sources["one"], sources["two"]])


def test_another_file_of_the_name_is_refused(files):
    paths, sources = files
    with pytest.raises(InputError, match="only from another of its name"):
        source_called(str(paths["three"]), [sources["one"]])
    with pytest.raises(InputError, match="only from another of its name"):
        source_called(str(paths["other"]), [sources["one"], sources["two"]])


def test_name_of_one_file_is_enough(files):
    _, sources = files
    assert source_called("moved/0.jsonl", [sources["one"], sources["copy"]]) == sources["one"]
    assert source_called("1.jsonl", [sources["one"]]) is None
