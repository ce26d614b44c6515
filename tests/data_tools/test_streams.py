import bz2
import gzip
import hashlib
import lzma
import subprocess
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.data_tools import streams
from megatron_blackmamba.data_tools.compression import KINDS, PIECE_BYTES
from megatron_blackmamba.data_tools.rejects import DAMAGED_FILE, TRUNCATED_FILE, InputError
from megatron_blackmamba.data_tools.streams import Damage, InputStream

COMPRESSORS = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
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
def test_members_join_for_any_block_size(suffix, tmp_path):
    @settings(deadline=None, max_examples=25)
    @given(pieces_of_text)
    def every(pieces):
        compress = COMPRESSORS.get(suffix, bytes)
        path = tmp_path / f"a{suffix}"
        stored = b"".join(map(compress, pieces))
        path.write_bytes(stored)
        if suffix or not any(kind.matches(stored) for kind in KINDS):
            assert read(path) == (b"".join(pieces), hashlib.sha256(stored).hexdigest(), len(stored))

    every()


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_truncated_member_is_damage_with_a_fingerprint(suffix, tmp_path):
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
            assert damage.value.reason == (TRUNCATED_FILE if cut == 0 or cut >= 8 else damage.value.reason)
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


def test_html_page_named_gz_is_recognised(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"<!DOCTYPE html><title>404</title>")
    with pytest.raises(Damage, match=r"begins with b'<!DOCTYPE html>"):
        read(tmp_path / "a.jsonl.gz")


def test_compression_is_detected_from_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b"text"))
    assert read(tmp_path / "a.jsonl")[0] == b"text"


def test_trailing_zeros_and_skippable_frames_are_accepted(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text") + bytes(512))
    assert read(tmp_path / "a.gz")[0] == b"text"
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    (tmp_path / "a.zst").write_bytes(skippable + COMPRESSORS[".zst"](b"text"))
    assert read(tmp_path / "a.zst")[0] == b"text"


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_highly_compressed_file_is_read_in_pieces(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(COMPRESSORS[suffix](bytes(40 << 20)))
    with InputStream(path) as stream:
        sizes = [len(block) for block in stream.blocks()]
    assert sum(sizes) == 40 << 20 and max(sizes) <= PIECE_BYTES


@pytest.mark.parametrize("faster", [True, False])
def test_gzip_members_end_with_either_library(tmp_path, monkeypatch, faster):
    if faster:
        pytest.importorskip("isal")
    else:
        monkeypatch.setitem(sys.modules, "isal", None)
    text = bytes(2 * PIECE_BYTES + 1)  # the member ends with input of the next one in hand
    (tmp_path / "a.gz").write_bytes(gzip.compress(text) + gzip.compress(b"more") + bytes(7))
    assert read(tmp_path / "a.gz")[0] == text + b"more"


def test_lz4_is_read_where_its_package_is_installed(tmp_path):
    frame = pytest.importorskip("lz4.frame")
    (tmp_path / "a.lz4").write_bytes(frame.compress(b"one ") + frame.compress(b"two" * 1000))
    assert read(tmp_path / "a.lz4")[0] == b"one " + b"two" * 1000
    (tmp_path / "a.lz4").write_bytes(frame.compress(b"one " * 1000)[:-9])
    with pytest.raises(Damage), InputStream(tmp_path / "a.lz4") as stream:
        list(stream.blocks())


@pytest.mark.parametrize(
    ("module", "content", "said"),
    [
        ("lz4.frame", b"\x04\x22\x4d\x18and more", "pip install lz4"),
        ("bz2", bz2.compress(b"one"), "a Python that was built with it, or pipe: `bzip2 -dc"),
        ("lzma", lzma.compress(b"one"), "a Python that was built with it, or pipe: `xz -dc"),
    ],
)
def test_without_its_module_a_format_says_what_to_do(tmp_path, monkeypatch, module, content, said):
    """Python itself may lack bz2 and lzma, where it was built without their headers."""
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=said), InputStream(tmp_path / "a") as stream:
        list(stream.blocks())


SHORT_OF_MEMORY = """
import resource, sys
from megatron_blackmamba.data_tools.readers import Reader, ReadOptions
from megatron_blackmamba.data_tools.rejects import InputError

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
for path in sys.argv[1:]:
    rejected = []
    try:
        reader = Reader(path, "jsonl", ReadOptions(), lambda *bad: rejected.append(bad))
        print(sum(len(batch.texts) for batch in reader.batches()), rejected)
    except InputError as error:
        print(error, rejected)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_shortage_names_the_file_and_rejects_nothing(tmp_path):
    many, one, window = (tmp_path / f"{name}.jsonl.zst" for name in ("many", "one", "window"))
    line = b'{"text": "' + b"a" * (1 << 20) + b'"}\n'
    many.write_bytes(COMPRESSORS[".zst"](line * 310))
    one.write_bytes(COMPRESSORS[".zst"](b'{"text": "' + bytes(310 << 20)))
    wide = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=29)
    ).compressobj()  # reading it takes a buffer of 512 MB
    window.write_bytes(wide.compress(line) + wide.flush())
    command = [sys.executable, "-c", SHORT_OF_MEMORY, many, one, window]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "310 []"
    for path, words in zip((one, window), said[1:], strict=True):
        assert words.startswith(f"{path}: out of memory near byte") and words.endswith("leave the file out []")
