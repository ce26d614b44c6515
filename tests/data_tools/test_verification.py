import hashlib
import shutil

import numpy as np
import pytest

from data_tools import verification
from data_tools.tokenization import TokenizeOptions, tokenize
from data_tools.verification import adopt, verify
from megatron_blackmamba.formats.shards import Shard, ShardError, beside, write_idx

TEXTS = [f"document {i} " * (i % 5 + 1) for i in range(60)]


@pytest.fixture
def folder(tokenizer_file, write_jsonl, tmp_path):
    """Two sound shards."""
    paths = [write_jsonl("a.jsonl", TEXTS), write_jsonl("b.jsonl", TEXTS[7:])]
    tokenize(
        paths, tmp_path / "out", TokenizeOptions(tokenizer=str(tokenizer_file), shard_size="1", workers=1, quiet=True)
    )
    return tmp_path / "out"


def problems(folder, **options):
    return [" ".join(verdict.problems) for verdict in verify([folder], quiet=True, **options)]


def rewrite(path, change):
    """Change a .bin and put its new sha256 into the manifest, as a careless tool would."""
    tokens = np.fromfile(beside(path, ".bin"), np.uint16)
    change(tokens)
    old = hashlib.sha256(beside(path, ".bin").read_bytes()).hexdigest()
    tokens.tofile(beside(path, ".bin"))
    new = hashlib.sha256(tokens.tobytes()).hexdigest()
    manifest = beside(path, ".manifest.json")
    manifest.write_text(manifest.read_text().replace(old, new))


def test_sound_shards_have_no_problem(folder, monkeypatch):
    assert problems(folder) == ["", ""] == problems(folder, quick=True)
    monkeypatch.setattr(verification, "_CHUNK_BYTES", 14)  # borders of chunks fall on and beside borders of documents
    assert problems(folder, cores=2) == ["", ""]


def test_one_changed_bit_is_found(folder):
    path = folder / "shard_00002.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert [bool(text) for text in problems(folder)] == [False, True]
    assert "sha256 is not the one in the manifest" in problems(folder)[1]
    assert problems(folder, quick=True) == ["", ""]  # it reads no token


@pytest.mark.parametrize("quick", [False, True])
def test_cut_missing_and_unfinished_files_are_found_without_reading_tokens(folder, quick):
    path = folder / "shard_00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    (folder / "shard_00002.idx").unlink()
    (folder / "shard_00003.bin").write_bytes(b"\1\0")
    found = problems(folder, quick=quick)
    assert "the file is cut or was replaced" in found[0]
    assert "shard_00002.idx: no such index" in found[1]
    assert "shard_00003.manifest.json: no such manifest" in found[2]


def test_tokens_beyond_the_vocabulary_and_misplaced_eods_are_found(folder, monkeypatch):
    monkeypatch.setattr(verification, "_CHUNK_BYTES", 30)
    prefix = folder / "shard_00001"
    sound = {path: path.read_bytes() for path in folder.iterdir()}
    lengths = Shard.open(prefix).idx.sequence_lengths
    third_end = int(np.cumsum(lengths)[2]) - 1

    def put(place, token):
        def change(tokens):
            tokens[place] = token

        for path, content in sound.items():
            path.write_bytes(content)
        rewrite(prefix, change)
        return problems(folder)[0]

    assert "holds token 65535, the vocabulary ends at 599" in put(5, 65535)
    assert f"token {third_end - 1} is EOD in the middle" in put(third_end - 1, 0)
    assert f"ends with token {third_end} does not end with EOD" in put(third_end, 5)


def test_the_same_tokens_twice_are_found(folder):
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(folder / f"shard_00001{suffix}", folder / f"shard_00009{suffix}")
    assert "holds the very tokens of" in problems(folder)[2]


def test_an_empty_folder_is_no_proof(tmp_path):
    with pytest.raises(ShardError, match="no shard in this folder"):
        verify([tmp_path])


def test_shards_of_other_tools_are_adopted_after_a_look(tmp_path, tokenizer):
    tokens = np.array([5, 6, 0, 7, 0], np.uint16)
    (tmp_path / "text_document.bin").write_bytes(tokens.tobytes())
    with open(tmp_path / "text_document.idx", "wb") as file:
        write_idx(file, tokens.dtype, np.array([3, 2]))
    adopt(tmp_path / "text_document.bin", tokenizer)
    assert problems(tmp_path) == [""]
    assert Shard.open(tmp_path / "text_document").document(1).tolist() == [7, 0]
    (tmp_path / "text_document.bin").write_bytes(np.array([5, 6, 0, 700, 0], np.uint16).tobytes())
    with pytest.raises(ShardError, match=r"holds token 700, but .* another tokenizer"):
        adopt(tmp_path / "text_document", tokenizer)
    (tmp_path / "text_document.bin").write_bytes(tokens.tobytes()[:-2])
    with pytest.raises(ShardError, match=r"describes 10 bytes of tokens, the \.bin has 8"):
        adopt(tmp_path / "text_document", tokenizer)
