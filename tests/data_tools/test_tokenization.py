import contextlib
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from megatron_blackmamba.data_tools import shard_writer, workers
from megatron_blackmamba.data_tools.provenance import origin
from megatron_blackmamba.data_tools.rejects import LISTED_AT_MOST, InputError
from megatron_blackmamba.data_tools.shuffle import document_order
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, plan
from megatron_blackmamba.formats.shards import Shard
from megatron_blackmamba.tokenizer import Tokenizer

TEXTS = [f"document {i} " + "def f(x): return x\n" * (i % 7) for i in range(40)]


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts_of(shard, tokenizer):
    return [tokenizer.decode(shard.document(i)[:-1]) for i in range(shard.manifest.documents)]


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def written_by_megatron(megatron, folder, tokenizer, texts):
    """The same documents by megatron-core's own builder, one at a time."""
    import torch

    builder = megatron.IndexedDatasetBuilder(
        str(folder / "theirs.bin"), dtype=megatron.DType.optimal_dtype(tokenizer.vocab_size)
    )
    for text in texts:
        ids = [*tokenizer.encode(text), tokenizer.eod_id]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(folder / "theirs.idx"))
    return (folder / "theirs.bin").read_bytes(), (folder / "theirs.idx").read_bytes()


def test_unshuffled_shard_equals_megatron_output(run, write_jsonl, tokenizer, tmp_path, megatron):
    texts = [*TEXTS, "é\u0301 \U0001f680", "a <|endoftext|> in the text", " "]
    run(write_jsonl("a.jsonl", texts), shuffle=False)
    ours = (tmp_path / "out/shard_00001.bin").read_bytes(), (tmp_path / "out/shard_00001.idx").read_bytes()
    assert ours == written_by_megatron(megatron, tmp_path, tokenizer, texts)


def test_every_document_has_one_eod_at_its_end(run, write_jsonl, tokenizer, tmp_path):
    run(write_jsonl("a.jsonl", ["one<|endoftext|>two", "<|endoftext|>", "three"]), shuffle=False)
    shard = Shard.open(tmp_path / "out/shard_00001")
    assert (shard.token_ids[:] == tokenizer.eod_id).sum() == 3
    assert texts_of(shard, tokenizer) == ["one<|endoftext|>two", "<|endoftext|>", "three"]


def test_a_flag_lets_text_be_an_eod(run, write_jsonl, tokenizer, tmp_path):
    run(write_jsonl("a.jsonl", ["one<|endoftext|>two"]), special_text=True)
    assert (Shard.open(tmp_path / "out/shard_00001").token_ids[:] == tokenizer.eod_id).sum() == 2


def test_shuffle_is_seeded_and_matches_provenance(run, write_jsonl, tokenizer, tmp_path):
    path = write_jsonl("a.jsonl", TEXTS)
    for seed in (0, 1):
        run(path, out=f"seed{seed}", seed=seed)
        shard = Shard.open(tmp_path / f"seed{seed}/shard_00001")
        assert texts_of(shard, tokenizer) == [TEXTS[i] for i in document_order(seed, 1, len(TEXTS))]
    run(path, out="again")
    assert files(tmp_path / "again") == files(tmp_path / "seed0") != files(tmp_path / "seed1")


def test_all_kinds_of_input_hold_the_same_documents(run, write_jsonl, tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = write_jsonl("a.jsonl", TEXTS)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_text("|".join(TEXTS))
    expected = None
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.txt"):
        run(tmp_path / name, out=f"from_{name}", marker="|" if name == "e.txt" else None)
        content = files(tmp_path / f"from_{name}")["shard_00001.bin"]
        expected = expected or content
        assert content == expected


def test_presets_know_field_and_format(run, tmp_path, tokenizer):
    (tmp_path / "raw/sub").mkdir(parents=True)
    (tmp_path / "raw/README.md").write_text("not data")
    (tmp_path / "raw/sub/1.json.gz").write_bytes(gzip.compress(b'{"id": 1, "text": "a paper"}\n'))
    run(tmp_path / "raw", preset="pes2o")
    assert texts_of(Shard.open(tmp_path / "out/shard_00001"), tokenizer) == ["a paper"]
    with pytest.raises(InputError, match="pile, slimpajama"):
        run(tmp_path / "raw", preset="piles")


def test_standard_input_is_a_source(run, tokenizer, tmp_path, monkeypatch):
    stream = io.BytesIO(b'{"text": "from a pipe"}\n')
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream, isatty=lambda: False))
    run("-")
    shard = Shard.open(tmp_path / "out/shard_00001")
    assert texts_of(shard, tokenizer) == ["from a pipe"]
    assert [source.name for source in shard.manifest.sources] == ["stdin"]


def test_the_manifest_counts_what_is_there(run, write_jsonl, tmp_path, tokenizer_file):
    paths = [write_jsonl("a.jsonl", TEXTS), write_jsonl("b.jsonl", ["é"])]
    run(*paths)
    shard = Shard.open(tmp_path / "out/shard_00001")
    manifest = shard.manifest
    assert (manifest.documents, manifest.tokens) == (41, len(shard.token_ids))
    assert manifest.text_bytes == sum(map(len, TEXTS)) + 2
    assert [(source.name, source.records, source.documents) for source in manifest.sources] == [
        ("a.jsonl", 40, 40),
        ("b.jsonl", 1, 1),
    ]
    assert manifest.rechecked == 41  # small shards are checked whole
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer_file.read_bytes()


# --- bad input ----------------------------------------------------------------------------------------------------


GOOD = b'{"text": "good"}\n'
BAD_FILES = {
    "invalid JSON": ("a.jsonl", GOOD + b'{"text" "x"}\n' + GOOD, 2),
    "missing field": ("a.jsonl", GOOD + GOOD + b'{"content": "x"}\n', 3),
    "not a string": ("a.jsonl", b'{"text": 3}\n' + GOOD, 1),
    "invalid UTF-8": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', 2),
    "lone surrogate": ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', 2),
    "empty": ("a.jsonl", GOOD + b'{"text": ""}\n' + GOOD, 2),
    "truncated last line": ("a.jsonl", GOOD + b'{"text": "x', 2),
    "truncated compression": ("a.jsonl.gz", gzip.compress(GOOD)[:-4], 2),
    "damaged compression": ("a.jsonl.zst", b"<html>", 1),
}


@pytest.mark.parametrize("reason", BAD_FILES)
def test_bad_input_stops_or_is_counted_and_listed(reason, run, write_jsonl, tmp_path):
    name, content, record = BAD_FILES[reason]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        run(path)
    assert f"{path}, record {record}: {reason}" in str(error.value)
    assert "--max-bad" in str(error.value)
    assert set(files(tmp_path / "out")) == {"tokenizer.json"}

    run(path, write_jsonl("whole.jsonl", ["whole"]), max_bad="1")
    manifest = Shard.open(tmp_path / "out/shard_00001").manifest
    assert manifest.rejected == {reason: 1}
    assert [(reject.source, reject.record, reject.reason) for reject in manifest.rejects] == [(name, record, reason)]
    assert manifest.sources[0].records == manifest.sources[0].documents + 1


def test_blank_lines_are_listed_but_not_bad(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n  \n" + GOOD)
    run(tmp_path / "a.jsonl")
    manifest = Shard.open(tmp_path / "out/shard_00001").manifest
    assert manifest.rejected == {"blank": 2} and manifest.documents == 2


def test_first_bad_record_is_named_behind_blank_lines(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n" * LISTED_AT_MOST + b"{")
    with pytest.raises(InputError, match=rf"the first is a\.jsonl, record {LISTED_AT_MOST + 2}"):
        run(tmp_path / "a.jsonl", max_bad="0.00001")


def test_every_document_keeps_its_record_number(run, tmp_path, tokenizer):
    lines = [json.dumps({"text": f"record {n}"}) if n % 3 else "{" for n in range(1, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps({"text": "record 2"}))
    run(tmp_path / "a.jsonl", tmp_path / "b.jsonl", max_bad="100")
    shard = Shard.open(tmp_path / "out/shard_00001")
    for place, text in enumerate(texts_of(shard, tokenizer)):
        assert text == f"record {origin(shard.manifest, place).record}"
    assert {origin(shard.manifest, i).source for i in range(shard.manifest.documents)} == {"a.jsonl", "b.jsonl"}


def test_a_shard_without_a_document_is_refused(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    with pytest.raises(InputError, match=r"a\.jsonl: not one document"):
        run(tmp_path / "a.jsonl")


def test_text_that_becomes_end_of_document_is_refused(run, write_jsonl, tokenizer, tmp_path):
    letter = tokenizer.decode(tokenizer.encode("q"))
    assert letter == "q"  # one token, so that it can be named as the end
    with pytest.raises(InputError, match=r"a\.jsonl, record 2: its text becomes q, the end of a document"):
        run(write_jsonl("a.jsonl", ["without", "a q inside"]), eod="q", backend="tokenizers")


@pytest.mark.parametrize(
    ("max_bad", "said"),
    [
        (
            "0",
            r"record 2: invalid JSON.*\. To skip such records and list them in .*: --max-bad 100, or --max-bad 0\.1%",
        ),
        ("1", r"record 4: invalid JSON.*; that makes 2 in this shard, and --max-bad allows 1$"),
        ("20%", r"2 of 5 records are bad \(.*\), more than --max-bad 0\.2 allows; the first is a\.jsonl, record 2"),
        ("40%", None),
        ("0.4", None),
        ("many", "--max-bad many: give a number .* or a fraction"),
    ],
)
def test_too_many_bad_records_are_counted(run, tmp_path, max_bad, said):
    good, bad = '{"text": "some text"}\n', "{broken\n"
    (tmp_path / "a.jsonl").write_text(good + bad + good + bad + good)
    if said is None:
        run(tmp_path / "a.jsonl", max_bad=max_bad)
        return
    with pytest.raises(InputError, match=said):
        run(tmp_path / "a.jsonl", max_bad=max_bad)


@pytest.mark.parametrize(
    ("record", "option"),
    [
        (b'{"content": "some text"}', "If the text is in another field, name it: --field NAME. To skip"),
        (b'{"text": ["some text"]}', "If the text is in another field, name it: --field NAME. To skip"),
        (b'{"text": "caf\xe9"}', "If the file has another encoding, name it: --encoding latin-1. To skip"),
    ],
)
def test_input_of_another_kind_names_its_option(run, tmp_path, record, option):
    (tmp_path / "a.jsonl").write_bytes(record + b"\n")
    with pytest.raises(InputError, match=option):
        run(tmp_path / "a.jsonl")


def test_a_file_that_grows_meanwhile_is_refused(run, write_jsonl, tmp_path, monkeypatch):
    path = write_jsonl("a.jsonl", TEXTS)

    def and_then_grow(self, texts, **options):
        with open(path, "a") as file:
            file.write("\n")
        return encode_batch(self, texts, **options)

    encode_batch = Tokenizer.encode_batch
    monkeypatch.setattr(Tokenizer, "encode_batch", and_then_grow)
    with pytest.raises(InputError, match="another program is writing to it"):
        run(path)


def test_wrong_tokenizer_library_is_caught_by_the_reference(run, write_jsonl, tmp_path, monkeypatch):
    def wrong(self, texts, **options):
        ids, lengths = encode_batch(self, texts, **options)
        return np.where(ids == ids[-1], ids[0], ids), lengths

    encode_batch = Tokenizer.encode_batch
    monkeypatch.setattr(Tokenizer, "encode_batch", wrong)
    with pytest.raises(RuntimeError, match=r"a\.jsonl, record \d+: .* and the reference tokenizer disagree"):
        run(write_jsonl("a.jsonl", TEXTS))
    assert set(files(tmp_path / "out")) == {"tokenizer.json"}


def test_a_disk_that_is_full_is_named(run, write_jsonl, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_writer, "write_idx", full)
    with pytest.raises(InputError, match="No space left on device; nothing of shard_00001 was written"):
        run(write_jsonl("a.jsonl", TEXTS))
    assert set(files(tmp_path / "out")) == {"tokenizer.json"}


# --- doing it again -----------------------------------------------------------------------------------------------


def test_several_processes_make_what_one_makes(run, write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "BYTES_WORTH_A_PROCESS", 1)
    paths = [write_jsonl(f"{i}.jsonl", TEXTS[i:]) for i in range(5)]
    run(*paths, shard_size="1")
    run(*paths, shard_size="1", out="many", workers=2)
    assert files(tmp_path / "many") == files(tmp_path / "out")
    (tmp_path / "4.jsonl").write_text("{")
    with pytest.raises(InputError, match=r"4\.jsonl, record 1: truncated last line"):
        run(*paths, shard_size="1", out="bad", workers=2)
    assert not [path for path in (tmp_path / "bad").iterdir() if path.name.startswith(".")]


def test_a_plan_reads_no_file(write_jsonl, tmp_path):
    path = write_jsonl("a.jsonl", TEXTS)
    path.chmod(0)
    planned = plan([str(path)], tmp_path / "out", TokenizeOptions())
    assert [job.prefix for job in planned.mine] == [tmp_path / "out/shard_00001"]
    assert not (tmp_path / "out").exists()


# --- killed midway ------------------------------------------------------------------------------------------------


KILLS_ITSELF = """
import os, signal
from megatron_blackmamba.data_tools import shard_writer
encode = shard_writer._Writing._encode
def encode_and_die(self, *parts):
    encode(self, *parts)
    if any(path.stat().st_size for path in self.folder.iterdir()):
        os.kill(os.getpid(), signal.SIGKILL)
shard_writer._Writing._encode = encode_and_die
"""


def command(tokenizer_file, *arguments, first=""):
    """The command line, in small batches: there is time to kill it between two of them."""
    program = first + (
        "from megatron_blackmamba.data_tools import commands, readers; readers.BATCH_BYTES = 200_000; commands.app()"
    )
    return [sys.executable, "-c", program, "tokenize", *map(str, arguments), "-t", str(tokenizer_file)]


def large_file(path, megabytes):
    block = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    path.write_text(block * (megabytes * 10**6 // len(block)))
    return path


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)


def has_content(folder):
    with contextlib.suppress(FileNotFoundError):  # the shard was published meanwhile
        return any(path.stat().st_size for path in folder.glob(".shard_00001.tmp/*"))
    return False


def holds_whole_shards_only(folder):
    """Tell whether a folder has no shards but whole ones: the other worker may have published its own."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {"tokenizer.json"}
    shards = {name.partition(".")[0] for name in names}
    for shard in shards:
        Shard.open(folder / shard)
    return names == {f"{shard}.{part}" for shard in shards for part in ("bin", "idx", "manifest.json")}


def test_killed_job_leaves_no_shard_and_repeats_identically(run, tokenizer_file, tmp_path):
    path = large_file(tmp_path / "a.jsonl", 2)
    arguments = command(tokenizer_file, path, tmp_path / "out", first=KILLS_ITSELF)
    assert subprocess.run(arguments, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert has_content(tmp_path / "out")
    assert holds_whole_shards_only(tmp_path / "out")
    run(path)
    run(path, out="undisturbed")
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_kill_between_renames_leaves_no_valid_shard(run, write_jsonl, tmp_path, monkeypatch):
    path = write_jsonl("a.jsonl", TEXTS)
    run(path, out="undisturbed")

    def die(*_):
        raise SystemExit(137)

    for what in (
        "megatron_blackmamba.data_tools.shard_writer.ShardManifest.write",
        "megatron_blackmamba.data_tools.shard_writer.atomic.publish",
    ):
        run(path, seed=1, overwrite=True)
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(what, die)
            run(path, overwrite=True)
        assert not list((tmp_path / "out").glob("*.manifest.json"))
    (tmp_path / "out/.shard_00001.tmp").mkdir()
    (tmp_path / "out/.shard_00001.tmp/bucket_000").write_bytes(b"left behind")
    run(path)
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")


def test_two_at_once_on_one_shard_is_refused(tokenizer_file, run, write_jsonl, tmp_path):
    process = subprocess.Popen(
        command(tokenizer_file, "-", tmp_path / "out"), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        wait_for((tmp_path / "out/.shard_00001.tmp/bin").exists, process)  # it is made once the folder is locked
        with pytest.raises(InputError, match="another process is writing this shard"):
            run(write_jsonl("a.jsonl", TEXTS))
        process.stdin.write(b'{"text": "in peace"}\n')
        process.stdin.close()
        assert process.wait() == 0
    finally:
        process.kill()
    assert Shard.open(tmp_path / "out/shard_00001").manifest.documents == 1


def test_ctrl_c_stops_all_processes_and_cleans_up(tokenizer_file, tmp_path):
    paths = [large_file(tmp_path / f"{i}.jsonl", 30) for i in range(2)]
    arguments = command(tokenizer_file, *paths, tmp_path / "out", "--shard-size", "1", "--workers", "2")
    process = subprocess.Popen(
        arguments,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    wait_for(lambda: has_content(tmp_path / "out"), process)
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    assert process.returncode != 0
    assert holds_whole_shards_only(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*"))


def test_workers_whose_parent_was_killed_end_too(tokenizer_file, tmp_path):
    paths = [large_file(tmp_path / f"{i}.jsonl", 30) for i in range(2)]
    arguments = command(tokenizer_file, *paths, tmp_path / "out", "--shard-size", "1", "--workers", "2")
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for(lambda: has_content(tmp_path / "out"), process)
    process.kill()
    process.wait()
    end = time.monotonic() + 300
    while _group_lives(process.pid):
        assert time.monotonic() < end, "its workers live on"
        time.sleep(0.05)
    assert not list((tmp_path / "out").glob("shard_*"))


def _group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_nothing_heavy_is_imported_to_tokenize():
    modules = "commands, tokenization, verification, inspection, bpe, mixture"
    heavy = f"import sys; from megatron_blackmamba.data_tools import {modules}; "
    probe = heavy + "print(*[m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_a_giant_document_is_rechecked_by_its_beginning(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "_RECHECKED_CHARACTERS", 1000)
    lengths = []
    encode_each = Tokenizer.encode_each

    def spy(self, texts, **options):
        lengths.extend(map(len, texts))
        return encode_each(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_each", spy)
    (tmp_path / "book.txt").write_text("a long story " * 1000)
    run(tmp_path / "book.txt")
    assert lengths == [1000]
