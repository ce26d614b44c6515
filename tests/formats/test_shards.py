import errno
import io
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.cli.errors import may_pass
from megatron_blackmamba.formats import shards
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.shards import Shard, ShardError, ShardManifest, SourceFile
from tests.data.corpus import write_shard

UINT16 = np.dtype("uint16")


def write_idx(path, lengths, dtype=UINT16):
    with open(path, "wb") as file:
        shards.write_idx(file, dtype, np.asarray(lengths))
    return path


def make_shard(folder, lengths=(3, 1, 4), name="shard_00001"):
    tokens = np.arange(sum(lengths), dtype=UINT16)
    (folder / f"{name}.bin").write_bytes(tokens.tobytes())
    write_idx(folder / f"{name}.idx", lengths)
    manifest = ShardManifest(
        documents=len(lengths),
        tokens=len(tokens),
        dtype="uint16",
        bin_sha256="0" * 64,
        idx_sha256="0" * 64,
        eod_id=0,
        tokenizer="t",
        tokenizer_sha256="0" * 64,
        vocab_size=600,
        sources=[SourceFile(name="a", sha256="0" * 64, bytes=1, records=len(lengths), documents=len(lengths))],
    )
    manifest.write(folder / f"{name}.manifest.json")
    return folder / name


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 2**31 - 1), max_size=50), st.sampled_from(["uint16", "int32"]))
def test_an_index_reads_back_as_it_was_written(tmp_path_factory, lengths, dtype):
    path = write_idx(tmp_path_factory.mktemp("idx") / "a.idx", lengths, np.dtype(dtype))
    idx = shards.read_idx(path)
    assert idx.dtype == dtype and idx.documents == len(lengths) and idx.tokens == sum(lengths)
    assert idx.sequence_lengths.tolist() == lengths
    assert idx.document_indices.tolist() == list(range(len(lengths) + 1))
    shards.check_idx(idx, bin_bytes=sum(lengths) * np.dtype(dtype).itemsize)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=9), st.data())
def test_an_index_cut_anywhere_is_refused(tmp_path_factory, lengths, data):
    path = write_idx(tmp_path_factory.mktemp("idx") / "a.idx", lengths)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ShardError, match=r"a\.idx"):
        shards.read_idx(path)


def test_an_index_of_another_format_is_refused(tmp_path):
    path = write_idx(tmp_path / "a.idx", [1, 2])
    whole = bytearray(path.read_bytes())
    for at, value in ((0, 0x4E), (9, 2), (17, 99)):  # magic, version, type code
        damaged = whole.copy()
        damaged[at] = value
        path.write_bytes(damaged)
        with pytest.raises(ShardError):
            shards.read_idx(path)


def test_index_with_gaps_or_overlaps_is_refused(tmp_path):
    path = write_idx(tmp_path / "a.idx", [3, 1, 4])
    whole = path.read_bytes()
    pointers_at = 34 + 3 * 4
    for at, format, value, message in (
        (pointers_at + 8, "<q", 4, "sequence 1 begins at byte 4"),
        (34, "<i", -3, "length -3"),
        (pointers_at + 3 * 8 + 8, "<q", 3, "cover"),
    ):
        damaged = bytearray(whole)
        struct.pack_into(format, damaged, at, value)
        path.write_bytes(damaged)
        with pytest.raises(ShardError, match=message):
            shards.check_idx(shards.read_idx(path), bin_bytes=16)
    path.write_bytes(whole)
    with pytest.raises(ShardError, match=r"16 bytes of tokens, the \.bin has 14"):
        shards.check_idx(shards.read_idx(path), bin_bytes=14)


def test_a_document_without_tokens_cannot_be_written():
    with pytest.raises(ValueError, match="empty document"):
        shards.write_idx(io.BytesIO(), UINT16, np.array([3, 0]))


def test_the_narrowest_type_is_the_one_megatron_takes():
    from megatron.core.datasets.indexed_dataset import DType

    for size in (1, 600, 50277, 65499, 65500, 65536, 131072):
        assert shards.token_dtype(size) == np.dtype(DType.optimal_dtype(size))


def test_shard_opens_by_any_of_its_files(tmp_path):
    prefix = make_shard(tmp_path, name="v1.0.en")  # a dot is no suffix
    for suffix in ("", ".bin", ".idx", ".manifest.json"):
        shard = Shard.open(f"{prefix}{suffix}")
        assert [shard.document(i).tolist() for i in range(3)] == [[0, 1, 2], [3], [4, 5, 6, 7]]


def test_a_folder_is_searched_for_shards_in_order(tmp_path):
    for name in ("b/shard_00002", "b/shard_00001", "a/shard_00001"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_shard((tmp_path / name).parent, name=name.split("/")[1])
    found = [shard.prefix.relative_to(tmp_path).as_posix() for shard in find_shards(tmp_path)]
    assert found == ["a/shard_00001", "b/shard_00001", "b/shard_00002"]


def test_a_shard_that_is_not_whole_is_refused(tmp_path):
    prefix = make_shard(tmp_path)
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ShardError, match=r"shard_00001\.bin: 18 bytes, its manifest says 16"):
        Shard.open(prefix)
    (tmp_path / "shard_00001.bin").unlink()
    with pytest.raises(ShardError, match="missing"):
        Shard.open(prefix)


def test_an_index_of_another_shard_is_refused(tmp_path):
    prefix = make_shard(tmp_path)
    write_idx(f"{prefix}.idx", [4, 4])
    with pytest.raises(ShardError, match="2 documents, its manifest says 3"):
        Shard.open(prefix)


def test_tokens_without_a_manifest_are_explained(tmp_path):
    (tmp_path / "text_document.bin").write_bytes(b"\0\0")
    with pytest.raises(ShardError, match="data adopt"):
        Shard.open(tmp_path / "text_document")
    with pytest.raises(ShardError, match="data adopt"):
        find_shards(tmp_path)


def test_manifest_with_unknown_key_or_version_is_refused(tmp_path):
    path = make_shard(tmp_path).with_name("shard_00001.manifest.json")
    text = path.read_text()
    path.write_text(text.replace('"documents"', '"dokuments"', 1))
    with pytest.raises(ShardError, match="documents"):
        ShardManifest.read(path)
    path.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ShardError, match="manifest format 2, this version reads 1"):
        ShardManifest.read(path)


def test_tokens_are_read_where_they_are_asked_for(tmp_path):
    tokens = Shard.open(make_shard(tmp_path)).token_ids
    assert len(tokens) == 8 and tokens[:].tolist() == list(range(8))
    assert (tokens[3:5].tolist(), tokens[6:99].tolist(), tokens[5:2].tolist()) == ([3, 4], [6, 7], [])


def test_tokens_of_a_truncated_file_are_refused(tmp_path):
    shard = Shard.open(make_shard(tmp_path))
    assert shard.token_ids[:2].tolist() == [0, 1]
    os.truncate(shard.bin_path, 9)
    assert shard.token_ids[:4].tolist() == [0, 1, 2, 3]
    for asked in (slice(2, 6), slice(6, 8)):  # across the end, and wholly behind it
        with pytest.raises(ShardError, match=r"shard_00001\.bin: ends after 9 bytes, its manifest says 16"):
            shard.token_ids[asked]


def test_io_error_names_the_file_and_token(tmp_path, monkeypatch):
    shard = Shard.open(make_shard(tmp_path))

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(shards.UnreadableShardError, match=r"shard_00001\.bin: cannot be read at token 5: Input/output"):
        shard.token_ids[5:]
    assert may_pass(shards.UnreadableShardError())  # so that a launcher starts the ranks again


def test_token_file_closes_when_modules_are_gone(tmp_path, monkeypatch):
    """At exit, Python may have removed the module `os` before the last file."""
    file = Shard.open(write_shard(tmp_path / "a", 0, 10)).token_ids
    monkeypatch.setattr(shards, "os", None)
    file.__del__()
    del file._file
