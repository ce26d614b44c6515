import hashlib
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data_tools import verification
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize
from megatron_blackmamba.data_tools.verification import adopt, verify
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
def test_truncated_and_missing_files_need_no_token_scan(folder, quick):
    path = folder / "shard_00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    (folder / "shard_00002.idx").unlink()
    (folder / "shard_00003.bin").write_bytes(b"\1\0")
    found = problems(folder, quick=quick)
    assert "the file was truncated or replaced" in found[0]
    assert "shard_00002.idx: no such index" in found[1]
    assert "shard_00003.manifest.json: no such manifest" in found[2]
    assert {(each.documents, each.tokens) for each in verify([folder], quiet=True, quick=quick)} == {(0, 0)}


def test_tokens_beyond_vocabulary_and_misplaced_eods_are_found(folder, monkeypatch):
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
    assert "has the same tokens as" in problems(folder)[2]


def test_a_folder_named_in_two_ways_counts_once(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("out")
    found = verify(["out", folder, "link"], quiet=True)
    assert [str(verdict.prefix) for verdict in found] == ["out/shard_00001", "out/shard_00002"]
    assert not any(verdict.problems for verdict in found)


def test_an_empty_folder_is_no_proof(tmp_path):
    (tmp_path / "inside").mkdir()
    with pytest.raises(ShardError, match=r"(?s)no shard in this folder.*inside: no shard in this folder"):
        verify([tmp_path, tmp_path / "inside"])


def test_all_mixtures_name_their_missing_sources_at_once(tmp_path):
    files = [tmp_path / "ab.yaml", tmp_path / "c.yaml"]
    for file, names in zip(files, ("ab", "c"), strict=True):
        file.write_text(f"sources: [{', '.join(f'{{name: {name}, shards: {name}}}' for name in names)}]")
    refused = CliRunner().invoke(app, ["data", "verify", *map(str, files)])
    lines = str(refused.exception).splitlines()
    assert [line.split(" names no shard")[0] for line in lines] == [f"source {n!r}: shards: {n!r}" for n in "abc"]


def test_adopts_foreign_shards_after_a_check(tmp_path, tokenizer):
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


def test_a_negative_token_is_no_token(tmp_path, tokenizer):
    np.array([5, -7, 0], np.int32).tofile(tmp_path / "old.bin")
    with open(tmp_path / "old.idx", "wb") as file:
        write_idx(file, np.dtype("int32"), np.array([3]))
    with pytest.raises(ShardError, match="holds token -7"):
        adopt(tmp_path / "old", tokenizer)


def test_adoption_keeps_the_existing_manifest(folder, tokenizer):
    before = (folder / "shard_00001.manifest.json").read_bytes()
    with pytest.raises(ShardError, match="was written here and records its raw files"):
        adopt(folder / "shard_00001", tokenizer)
    assert (folder / "shard_00001.manifest.json").read_bytes() == before


def test_adopt_command_counts_documents_without_an_end(tmp_path, tokenizer, tokenizer_file):
    np.array([5, 6, tokenizer.eod_id, 7, 8], np.uint16).tofile(tmp_path / "old.bin")
    with open(tmp_path / "old.idx", "wb") as file:
        write_idx(file, np.dtype("uint16"), np.array([3, 2]))
    done = CliRunner().invoke(app, ["data", "adopt", str(tmp_path / "old"), "--tokenizer", str(tokenizer_file)])
    assert "2 documents, 5 tokens" in done.output and "1 of them do not end with" in done.output
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer.content


def test_another_tokenizer_beside_the_shards_is_found(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert all("than the tokenizer.json beside it" in text for text in problems(folder, quick=True))


def test_duplicate_raw_file_is_found_despite_the_shuffle(tokenizer_file, write_jsonl, tmp_path):
    paths = [write_jsonl("a.jsonl", TEXTS), write_jsonl("copy.jsonl", TEXTS)]
    options = TokenizeOptions(tokenizer=str(tokenizer_file), shard_size="1", workers=1, quiet=True)
    made = tokenize(paths, tmp_path / "out", options)
    assert made.copies == [("copy.jsonl", "a.jsonl")]
    first, second = (made.shards[i].manifest.bin_sha256 for i in range(2))
    assert first != second
    assert "the same raw files as" in problems(tmp_path / "out")[1]


@pytest.mark.parametrize("gone, left", [("shard_00001", "shard_00002"), ("shard_00002", "shard_00001")])
def test_a_missing_shard_is_found(folder, gone, left):
    for path in folder.glob(f"{gone}*"):
        path.unlink()
    assert f"lacks {gone} of 2 shards" in problems(folder)[0]
    (verdict,) = verify([folder / left], quiet=True)  # of shards named one by one, nobody expects the others
    assert not verdict.problems


def test_older_manifests_say_what_they_cannot_tell(folder):
    for path in folder.glob("*.manifest.json"):
        path.write_text(path.read_text().replace('"shards": 2', '"shards": 0'))
    for path in folder.glob("shard_00001*"):
        path.unlink()
    (verdict,) = verify([folder], quiet=True)
    assert not verdict.problems
    assert "lacks shard_00001" in verdict.notes[0] and "do not say how many shards" in verdict.notes[0]


def test_shards_behind_a_link_are_verified(folder, tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all/corpus").symlink_to(folder)
    assert len(verify([tmp_path / "all"], quiet=True)) == 2


def test_progress_reaches_the_size_of_the_tokens(folder):
    read = []
    verification.verify_shard(folder / "shard_00001", advance=read.append)
    assert read[-1] == (folder / "shard_00001.bin").stat().st_size


def test_unreadable_file_is_reported(folder):
    (folder / "shard_00001.idx").unlink()
    (folder / "shard_00001.idx").mkdir()
    (folder / "shard_00002.manifest.json").write_text(
        (folder / "shard_00002.manifest.json").read_text().replace('"uint16"', '"words"')
    )
    found = problems(folder)
    assert "Is a directory" in found[0] and "dtype" in found[1]


@pytest.mark.parametrize(
    ("dtype", "lengths", "reason"), [("float32", [2], "holds float32, not token ids"), ("uint16", [], "no document")]
)
def test_what_holds_no_tokens_is_not_adopted(dtype, lengths, reason, tokenizer, tmp_path):
    np.zeros(sum(lengths), dtype).tofile(tmp_path / "a.bin")
    with open(tmp_path / "a.idx", "wb") as file:
        write_idx(file, np.dtype(dtype), np.array(lengths))
    with pytest.raises(ShardError, match=reason):
        adopt(tmp_path / "a", tokenizer)
    assert not (tmp_path / "a.manifest.json").exists()
