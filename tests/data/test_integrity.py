"""Shards that changed after they were tokenized: found in the background, remembered, and named."""

import os
import time

import pytest

from megatron_blackmamba.data import BatchStream, DataError, ShardCheck, build, integrity
from megatron_blackmamba.data.stream import TokenStream
from megatron_blackmamba.formats.shards import Shard, ShardError
from tests.data.corpus import data_config, write_mixture, write_shard


@pytest.fixture
def shards(tmp_path):
    """Four shards, two of them of equal size."""
    sizes = {"one": 700, "two": 700, "three": 90, "four": 50}
    return [Shard.open(write_shard(tmp_path / name, 1000 * i, n)) for i, (name, n) in enumerate(sizes.items(), 1)]


@pytest.fixture
def check(shards, tmp_path):
    return lambda **more: ShardCheck(shards, tmp_path / "memory", **more)


def keep_times(path, status):
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def zero(shard, other):
    shard.bin_path.write_bytes(bytes(shard.bin_path.stat().st_size))


def flip_a_bit(shard, other):
    content = bytearray(shard.bin_path.read_bytes())
    content[1234] ^= 4
    shard.bin_path.write_bytes(content)


def replace(shard, other):
    write_shard(shard.prefix.with_name("elsewhere"), 90_000, shard.manifest.tokens)
    shard.prefix.with_name("elsewhere.bin").replace(shard.bin_path)


def swap(shard, other):
    shard.bin_path.rename(shard.prefix.with_name("aside"))
    other.bin_path.rename(shard.bin_path)
    shard.prefix.with_name("aside").rename(other.bin_path)


def damage_the_index(shard, other):
    content = bytearray(shard.idx_path.read_bytes())
    content[40] ^= 1
    shard.idx_path.write_bytes(content)


def test_unchanged_shards_pass(check):
    sound, said = check(), []
    sound.look()
    assert sound.findings == (0, 0)
    sound.after_step(*sound.findings, lambda event: said.append(event.sentence))
    sound.after_step(*sound.findings, lambda event: said.append(event.sentence))
    assert said == ["all shards match their manifests (4)"]


@pytest.mark.parametrize("change", [zero, flip_a_bit, replace, swap, damage_the_index])
@pytest.mark.parametrize("when", ["before the first look", "after it"])
def test_changed_shards_are_named(shards, check, change, when):
    watching = check()
    if when == "after it":
        watching.look()
    change(shards[0], shards[1])
    watching.look()
    with pytest.raises(DataError) as error:
        watching.after_step(*watching.findings, print)
    damaged = shards[0].idx_path if change is damage_the_index else shards[0].bin_path
    assert f"{damaged}: its sha256 is" in str(error.value)
    assert (f"{shards[1].bin_path}: its sha256 is" in str(error.value)) == (change is swap)
    assert len(watching.different) == 1 + (change is swap)


def test_damaged_local_copies_of_objects_say_so(shards, check, monkeypatch):
    monkeypatch.setenv("BLACKMAMBA_CACHE", str(shards[0].prefix.parent))
    content = bytearray(shards[0].bin_path.read_bytes())
    content[0] ^= 1
    shards[0].bin_path.write_bytes(content)
    watching = check()
    watching.look()
    with pytest.raises(DataError, match="are local copies: remove them, and the run fetches them again"):
        watching.after_step(*watching.findings, print)


def test_ranks_share_the_reading(shards, check):
    ranks = [check(rank=rank, ranks=3) for rank in range(3)]
    for rank in ranks:
        rank.look()
    assert sorted(s.prefix for rank in ranks for s in rank.share) == sorted(s.prefix for s in shards)
    assert all(len(rank.share) >= 1 for rank in ranks)


def test_a_restart_reads_only_changed_files(shards, check):
    check().look()
    again = check(ranks=1)
    again.look()
    assert again.findings == (0, 0) and again.bytes_read == 0
    os.utime(shards[2].bin_path)
    once_more = check()
    once_more.look()
    assert once_more.bytes_read == sum(p.stat().st_size for p in (shards[2].bin_path, shards[2].idx_path))


def test_equal_size_and_time_is_not_enough(shards, check):
    check().look()
    status = shards[0].bin_path.stat()
    replace(shards[0], None)  # another inode
    keep_times(shards[0].bin_path, status)
    again = check()
    again.look()
    assert again.findings[0] == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\x00", b"[" * 100_000, b'{"shard": 1}'])
def test_a_damaged_memory_only_costs_another_reading(check, tmp_path, content):
    check().look()
    for record in (tmp_path / "memory").iterdir():
        record.write_bytes(content)
    again = check()
    again.look()
    assert again.findings == (0, 0) and again.bytes_read > 0
    last = check()
    last.look()
    assert last.bytes_read == 0


def test_unwritable_cache_is_no_error(check, tmp_path):
    (tmp_path / "memory").write_text("a file stands where the folder should be")
    sound = check()
    sound.look()
    once = sound.bytes_read
    sound.look()
    assert sound.findings == (0, 0) and sound.bytes_read == once > 0


def test_a_file_out_of_reach_is_tried_again(shards, check, capsys):
    watching = check()
    shards[1].bin_path.rename(shards[1].prefix.with_name("aside"))
    watching.look()
    watching.look()
    assert watching.findings == (0, 1)
    assert capsys.readouterr().err.count("cannot be compared with its manifest yet") == 1
    shards[1].prefix.with_name("aside").rename(shards[1].bin_path)
    watching.look()
    assert watching.findings == (0, 0)


def test_thread_limits_its_rate_and_priority(check, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "setpriority", lambda which, thread, value: seen.append((thread, value)))
    size = sum(p.stat().st_size for s in check().share for p in (s.bin_path, s.idx_path))
    slow = check(mb_per_second=size / 1e6 / 0.5)
    begun = time.monotonic()
    slow.start()
    while slow.findings[1]:
        time.sleep(0.01)
    assert time.monotonic() - begun >= 0.4
    slow.stop()
    assert seen == [(slow._thread.native_id, 19)] and not slow._thread.is_alive()


def test_only_long_runs_report_unread_data(check, monkeypatch):
    said = []
    for short in (600, 0):
        monkeypatch.setattr(integrity, "SHORT_SECONDS", short)
        slow = check(mb_per_second=1e-6)
        slow.start()
        slow.end(lambda event: said.append(event.sentence), "my mixture.yaml")
        assert len(said) == (short == 0)
    assert said == [
        "note: 4 of 4 shards were not compared with their manifests yet; "
        "`blackmamba data verify 'my mixture.yaml'` does it now"
    ]


def test_a_rate_of_zero_reads_nothing(check):
    said = []
    off = check(mb_per_second=0)
    off.start()
    off.after_step(*off.findings, said.append)
    off.end(said.append)
    assert off.bytes_read == 0 and not said


@pytest.mark.parametrize("wrong", [2**30, 2**31 - 1, -1])
def test_an_id_outside_the_vocabulary_names_its_place(tmp_path, wrong):
    prefix = write_shard(tmp_path / "a/one", 0, 1000, document=37)
    shard = Shard.open(prefix)
    tokens = shard.token_ids[:]
    tokens[700] = wrong
    shard.bin_path.write_bytes(tokens.tobytes())
    mixture = write_mixture(tmp_path, [{"name": "a", "shards": "a"}])
    plan = build(data_config(mixture), vocab_size=2**30, total_samples=62)
    with pytest.raises(ShardError) as error, BatchStream(plan.train, global_batch=2, micro_batch=2) as stream:
        for _ in range(31):
            next(stream)
    message = str(error.value)
    assert f"{shard.bin_path}: token 700 (document 18; position " in message
    assert f"is {wrong}, but ids end at {2**30 - 1}" in message
    sample, position = int(message.split()[1][:-1]), int(message.split("position ")[1].split()[0])
    dataset = plan.train.datasets[0]
    assert (dataset.place(plan.train.schedule.locate(sample)[1]) + position) % 1000 == 700


def test_damaged_index_does_not_hide_wrong_id(tmp_path):
    shard = Shard.open(write_shard(tmp_path / "one", 0, 1000))
    tokens = shard.token_ids[:]
    tokens[5] = -7
    shard.bin_path.write_bytes(tokens.tobytes())
    damage_the_index(shard, None)
    with pytest.raises(ShardError, match=r"token 5 \(the index is damaged too; position 2 of its sample\) is -7"):
        TokenStream.of_shards([shard]).read(3, 10)


def test_file_replaced_during_reading_is_read_again(shards, check, monkeypatch):
    watching, sha256 = check(), ShardCheck._sha256

    def read(self, path):
        digest = sha256(self, path)
        if path == shards[0].bin_path and not self._correct:
            os.utime(path)
        return digest

    monkeypatch.setattr(ShardCheck, "_sha256", read)
    watching.look()
    assert watching.findings == (0, 1)
    watching.look()
    assert watching.findings == (0, 0)
