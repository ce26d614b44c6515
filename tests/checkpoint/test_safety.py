"""What a checkpoint's table of contents may ask for when it is read."""

import os
import pickle
from pathlib import PosixPath

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as FORMAT
from torch.distributed.checkpoint.metadata import Metadata

from megatron_blackmamba.checkpoint import safety
from megatron_blackmamba.checkpoint.manifest import CheckpointError


class Asks:
    """Pickles as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def table(folder, entry):
    (folder / safety.METADATA).write_bytes(pickle.dumps(Metadata(state_dict_metadata={"weight": entry})))
    return folder


def test_a_member_of_an_enum_is_read_however_this_python_pickles_it(tmp_path):
    as_debian_12_does = table(tmp_path, Asks(getattr, FORMAT, "TORCH_PRESERVE_FORMAT"))
    assert safety.read_table(as_debian_12_does).state_dict_metadata["weight"] is FORMAT.TORCH_PRESERVE_FORMAT
    assert safety.read_table(table(tmp_path, FORMAT.TORCH_CHANNELS_LAST)).state_dict_metadata  # as this one does


def test_a_path_is_read_whichever_python_wrote_it(tmp_path):
    for module in (b"pathlib", b"pathlib._local"):  # the second is that of Python 3.13
        (tmp_path / safety.METADATA).write_bytes(b"c" + module + b"\nPosixPath\n(Vfolder\ntR.")
        assert safety.read_table(tmp_path) == PosixPath("folder")


@pytest.mark.parametrize("name", ["__reduce__", "__class__", "mro", "_member_map_"])
def test_nothing_but_a_member_of_an_enum_is_reached_by_its_name(tmp_path, name):
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        safety.read_table(table(tmp_path, Asks(getattr, FORMAT, name)))


def test_a_function_that_no_table_needs_is_refused_and_not_run(tmp_path):
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        safety.read_table(table(tmp_path, Asks(os.mkdir, str(tmp_path / "ran"))))
    assert not (tmp_path / "ran").exists()
