import gzip
import hashlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import streams
from data_tools.rejects import DAMAGED_FILE, TRUNCATED_FILE
from data_tools.streams import Damage, InputStream

COMPRESSORS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
pieces_of_text = st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5)


def read(path):
    with InputStream(path) as stream:
        content = b"".join(stream.blocks())
        return content, stream.sha256(), stream.bytes_read


@pytest.fixture(params=[8, 50, 1 << 20])
def block_size(request, monkeypatch):
    monkeypatch.setattr(streams, "_READ_BYTES", request.param)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("suffix", ["", *COMPRESSORS])
def test_several_members_are_one_text_whatever_the_block_size(suffix, tmp_path):
    @settings(deadline=None, max_examples=25)
    @given(pieces_of_text)
    def every(pieces):
        compress = COMPRESSORS.get(suffix, bytes)
        path = tmp_path / f"a{suffix}"
        stored = b"".join(map(compress, pieces))
        path.write_bytes(stored)
        if suffix or not stored.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            assert read(path) == (b"".join(pieces), hashlib.sha256(stored).hexdigest(), len(stored))

    every()


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_file_cut_anywhere_inside_a_member_is_damage_and_still_has_a_fingerprint(suffix, tmp_path):
    @settings(deadline=None, max_examples=40)
    @given(pieces_of_text, st.data())
    def every(pieces, data):
        members = [COMPRESSORS[suffix](piece) for piece in pieces]
        stored = b"".join(members)
        borders = {sum(map(len, members[:n])) for n in range(1, len(members) + 1)}
        cut = data.draw(st.integers(0, len(stored) - 1).filter(lambda n: n not in borders))
        path = tmp_path / f"a{suffix}"
        path.write_bytes(stored[:cut])
        with InputStream(path) as stream:
            content = []
            with pytest.raises(Damage) as damage:
                content.extend(stream.blocks())
            whole_before_cut = sum(border <= cut for border in borders)
            assert b"".join(content).startswith(b"".join(pieces[:whole_before_cut]))
            assert damage.value.reason == (TRUNCATED_FILE if cut == 0 or cut > 4 else damage.value.reason)
            assert stream.sha256() == hashlib.sha256(stored[:cut]).hexdigest()

    every()


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_flipped_byte_is_damage(suffix, tmp_path):
    stored = bytearray(COMPRESSORS[suffix](bytes(range(256)) * 40))
    stored[len(stored) // 2] ^= 0xFF
    path = tmp_path / f"a{suffix}"
    path.write_bytes(stored)
    with pytest.raises(Damage) as damage:
        read(path)
    assert damage.value.reason == DAMAGED_FILE


def test_a_web_page_saved_as_gzip_is_told_apart(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"<!DOCTYPE html><title>404</title>")
    with pytest.raises(Damage, match=r"begins with b'<!DOCTYPE html>"):
        read(tmp_path / "a.jsonl.gz")


def test_compression_is_told_by_the_content_not_the_name(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b"text"))
    assert read(tmp_path / "a.jsonl")[0] == b"text"


def test_zeros_behind_the_last_member_and_skippable_frames_are_no_damage(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text") + bytes(512))
    assert read(tmp_path / "a.gz")[0] == b"text"
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    (tmp_path / "a.zst").write_bytes(skippable + COMPRESSORS[".zst"](b"text"))
    assert read(tmp_path / "a.zst")[0] == b"text"
