"""A second call into the same folder: what is done stays, what was meant otherwise is refused."""

import json
import os

import pytest

from megatron_blackmamba.data_tools import workers
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.remote import file_sha256

TEXTS = [f"document {i} " + "def f(x): return x\n" * (i % 7) for i in range(40)]


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_second_call_rebuilds_only_damaged_shards(run, write_jsonl, tmp_path):
    paths = [write_jsonl("a.jsonl", TEXTS), write_jsonl("b.jsonl", TEXTS[:5])]
    assert len(run(*paths, shard_size="1").written) == 2
    before = files(tmp_path / "out")
    assert len(run(*paths, shard_size="1").written) == 0
    damaged = tmp_path / "out/shard_00002.bin"
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    assert [manifest.shard for manifest in run(*paths, shard_size="1").written] == [2]
    (tmp_path / "out/shard_00001.manifest.json").unlink()
    assert [manifest.shard for manifest in run(*paths, shard_size="1").written] == [1]
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 1}, "shuffled with seed 0, not 1"),
        ({"shuffle": False}, "is shuffled"),
        ({"special_text": True}, "special_text = False, not True"),
        ({"fields": ("text", "text")}, "fields = "),
        ({"format": "text"}, "formats = "),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(change, message, run, write_jsonl, tmp_path):
    path = write_jsonl("a.jsonl", TEXTS)
    run(path)
    before = files(tmp_path / "out")
    with pytest.raises(InputError, match=message):
        run(path, **change)
    assert files(tmp_path / "out") == before
    run(path, **change, overwrite=True)
    assert files(tmp_path / "out") != before


def test_other_inputs_in_the_same_folder_are_refused(run, write_jsonl, tmp_path):
    paths = [write_jsonl("a.jsonl", TEXTS), write_jsonl("b.jsonl", TEXTS[:5])]
    run(*paths, shard_size="1")
    with pytest.raises(InputError, match=r"shard_00002.* these inputs make 1 shards"):
        run(*paths)
    with pytest.raises(InputError, match=r"was made from a\.jsonl .*b\.jsonl is not"):
        run(paths[1], paths[0], shard_size="1")
    write_jsonl("a.jsonl", [text.upper() for text in TEXTS])
    with pytest.raises(InputError, match=r"was made from a\.jsonl"):
        run(*paths, shard_size="1")
    run(*paths, overwrite=True)
    assert len(find_shards(tmp_path / "out")) == 1


def test_touched_but_equal_file_counts_as_unchanged(run, write_jsonl):
    path = write_jsonl("a.jsonl", TEXTS)
    run(path)
    os.utime(path, (1, 1))
    assert run(path).written == []


def test_new_files_at_the_end_only_add_shards(run, write_jsonl):
    paths = [write_jsonl("a.jsonl", TEXTS), write_jsonl("b.jsonl", TEXTS[:5])]
    run(paths[0], shard_size="1")
    assert [manifest.shard for manifest in run(*paths, shard_size="1").written] == [2]


def test_an_array_makes_what_one_call_makes(run, write_jsonl, tmp_path):
    paths = [write_jsonl(f"{i}.jsonl", TEXTS[i:]) for i in range(5)]
    run(*paths, shard_size="1")
    for index in (2, 0, 1):
        run(*paths, shard_size="1", out="array", array=f"{index}/3")
    assert files(tmp_path / "array") == files(tmp_path / "out")


def test_array_task_with_another_tokenizer_is_refused(run, write_jsonl, tmp_path, tokenizer_file):
    paths = [write_jsonl(f"{i}.jsonl", TEXTS[i:]) for i in range(2)]
    run(*paths, shard_size="1", array="0/2")
    (tmp_path / "other.json").write_bytes(tokenizer_file.read_bytes() + b"\n")
    before = files(tmp_path / "out")
    with pytest.raises(InputError, match="was made with another tokenizer"):
        run(*paths, shard_size="1", array="1/2", tokenizer=str(tmp_path / "other.json"))
    assert files(tmp_path / "out") == before


def test_flags_that_would_change_nothing_are_refused(run, write_jsonl, tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(InputError, match="--marker splits text files"):
        run(write_jsonl("a.jsonl", TEXTS), marker="|")
    with pytest.raises(InputError, match="--field chooses from records"):
        run(tmp_path / "a.txt", fields=("content",))


def test_a_newer_option_names_its_former_value(run, write_jsonl, tmp_path):
    path = write_jsonl("a.jsonl", TEXTS)
    run(path)
    manifest = tmp_path / "out/shard_00001.manifest.json"
    content = json.loads(manifest.read_text())
    del content["options"]["lengths"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"was made with lengths = None, not \[3, None\]"):
        run(path, min_tokens=3)


def test_copied_inputs_are_hashed_once(run, write_jsonl, monkeypatch):
    path = write_jsonl("a.jsonl", TEXTS)
    run(path)
    os.utime(path, (1, 1))
    hashed = []
    monkeypatch.setattr(workers, "file_sha256", lambda file: hashed.append(str(file)) or file_sha256(file))
    assert run(path).written == [] and hashed.count(str(path)) == 1
