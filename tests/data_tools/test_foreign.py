"""Token files of other tools become shards without a copy; datatrove's pipelines write ours."""

import csv
import gzip
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data_tools.foreign import expose
from megatron_blackmamba.data_tools.inspection import by_source
from megatron_blackmamba.data_tools.provenance import Origin, origin, places_of, source_called
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.formats.find_shards import find_shards
from megatron_blackmamba.formats.shards import Shard

TEXTS = [f"document {i}: " + "import json and read the text " * (i % 9) for i in range(50)]


@pytest.fixture
def documents(tokenizer):
    """Token ids of each text, its EOD included."""
    return [[*tokenizer.encode(text), tokenizer.eod_id] for text in TEXTS]


def adopt(path, tokenizer_file, *options):
    done = CliRunner().invoke(app, ["data", "adopt", str(path), "-t", str(tokenizer_file), *options])
    if done.exception:
        raise done.exception
    return Shard.open(path.with_name(path.name.removesuffix(path.suffix)))


def same(shard, documents):
    return [shard.document(i).tolist() for i in range(shard.manifest.documents)] == documents


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_datatrove_s_files_are_adopted_in_place(tmp_path, documents, tokenizer_file, dtype):
    path = tmp_path / "00000_unshuffled.ds"
    np.concatenate(documents).astype(dtype).tofile(path)
    np.cumsum([len(ids) for ids in documents]).astype("<u8").tofile(f"{path}.index")
    shard = adopt(path, tokenizer_file)
    assert same(shard, documents) and shard.bin_path.samefile(path)
    assert CliRunner().invoke(app, ["data", "verify", str(tmp_path)]).exit_code == 0


def test_datatrove_s_own_tokenizer_writes_what_is_adopted(tmp_path, tokenizer_file):
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    written = TokenizedFile(str(tmp_path), "a.ds")
    for ids in ([3, 4, 5, 0], [6, 0]):
        written.write(ids, None)
    written.close()
    assert same(adopt(tmp_path / "a.ds", tokenizer_file), [[3, 4, 5, 0], [6, 0]])


@pytest.mark.parametrize("listed", [True, False])
def test_bare_npy_files_are_adopted_in_place(tmp_path, documents, tokenizer_file, listed):
    path = tmp_path / "part-0-00000.npy"
    np.concatenate(documents).astype("uint16").tofile(path)
    if listed:
        ends = np.cumsum([len(ids) for ids in documents]).tolist()
        with gzip.open(tmp_path / "part-0-00000.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows([a, b, "id", "src", i] for i, (a, b) in enumerate(zip([0, *ends], ends)))  # noqa: B905
    shard = adopt(path, tokenizer_file)
    assert same(shard, documents) and shard.bin_path.samefile(path)


def test_wide_tokens_are_not_read_as_narrow_ones(tmp_path, documents, tokenizer_file):
    path = tmp_path / "a.npy"
    np.concatenate(documents).astype("uint32").tofile(path)
    with pytest.raises(InputError, match="every second 2-byte token is 0"):
        adopt(path, tokenizer_file)
    assert same(adopt(path, tokenizer_file, "--dtype", "uint32"), documents)


def test_overlapping_documents_and_unknown_types_are_refused(tmp_path, tokenizer):
    np.arange(1, 9, dtype="uint16").tofile(tmp_path / "a.ds")
    np.array([5, 3, 8], "<u8").tofile(tmp_path / "a.ds.index")
    with pytest.raises(InputError, match=r"a\.ds: the documents of its index overlap"):
        expose(tmp_path / "a.ds", tokenizer)
    with pytest.raises(InputError, match="--dtype int64: choose uint16 or uint32"):
        expose(tmp_path / "a.ds", tokenizer, "int64")
    assert not (tmp_path / "a.bin").exists()


def test_token_files_that_do_not_fit_are_refused(tmp_path, tokenizer):
    (tmp_path / "a.npy").write_bytes(b"\1\0\2")
    with pytest.raises(InputError, match="3 bytes are not a whole number of 2-byte tokens"):
        expose(tmp_path / "a.npy", tokenizer)
    (tmp_path / "b.ds").write_bytes(b"\1\0\2\0")
    np.array([0], "<u8").tofile(tmp_path / "b.ds.index")
    with pytest.raises(InputError, match="its index ends at token 0"):
        expose(tmp_path / "b.ds", tokenizer)
    (tmp_path / "b.ds.index").unlink()
    with pytest.raises(InputError, match=r"b.ds.index: missing"):
        expose(tmp_path / "b.ds", tokenizer)
    np.array([7], "<u8").tofile(tmp_path / "b.ds.index")
    with pytest.raises(InputError, match="its index ends at token 7"):
        expose(tmp_path / "b.ds", tokenizer, "uint16")
    np.save(tmp_path / "c.npy", np.zeros((2, 2), "uint16"))
    with pytest.raises(InputError, match="not a row of little-endian uint16"):
        expose(tmp_path / "c.npy", tokenizer)
    np.save(tmp_path / "c.npy", np.ones(4, ">u2"))
    with pytest.raises(InputError, match="holds >u2 of shape"):
        expose(tmp_path / "c.npy", tokenizer)
    (tmp_path / "c.npy").write_bytes((tmp_path / "c.npy").read_bytes()[:20])
    with pytest.raises(InputError, match=r"c\.npy: its numpy header cannot be read"):
        expose(tmp_path / "c.npy", tokenizer)


@pytest.mark.parametrize(
    "table",
    [b"no gzip", gzip.compress(b"0,4\n")[:-6], gzip.compress(b"4\n")],
    ids=["not compressed", "cut", "one column"],
)
def test_a_damaged_table_of_documents_is_named(tmp_path, tokenizer, table):
    np.ones(4, "<u2").tofile(tmp_path / "a.npy")
    (tmp_path / "a.csv.gz").write_bytes(table)
    with pytest.raises(InputError, match=r"a\.csv\.gz: not a table with the end of each document"):
        expose(tmp_path / "a.npy", tokenizer)


def test_document_too_long_for_an_index_is_named(tmp_path, tokenizer):
    with open(tmp_path / "a.ds", "wb") as file:
        file.truncate((2 << 32) + 20)  # sparse; as int32 its length would be 9
    np.array([1, (1 << 32) + 10], "<u8").tofile(tmp_path / "a.ds.index")
    with pytest.raises(InputError, match=r"a\.ds: document 2 has 4,294,967,305 tokens, and an index holds 2\^31 - 1"):
        expose(tmp_path / "a.ds", tokenizer)
    assert not (tmp_path / "a.bin").exists()


def test_a_cut_index_is_named(tmp_path, tokenizer):
    np.ones(4, "<u2").tofile(tmp_path / "a.ds")
    (tmp_path / "a.ds.index").write_bytes(np.array([2, 4], "<u8").tobytes()[:-1])
    with pytest.raises(InputError, match=r"a\.ds\.index: 15 bytes .* it was cut"):
        expose(tmp_path / "a.ds", tokenizer)


def test_empty_documents_of_an_adopted_file_are_counted(tmp_path, documents, tokenizer_file):
    path = tmp_path / "a.ds"
    np.concatenate(documents).astype("uint16").tofile(path)
    ends = np.cumsum([len(ids) for ids in documents])
    np.sort(np.concatenate([[0], ends, ends[3:4]])).astype("<u8").tofile(f"{path}.index")  # documents 1 and 6
    shard = adopt(path, tokenizer_file)
    assert same(shard, documents)
    numbers = [number for number in range(1, len(TEXTS) + 3) if number not in (1, 6)]
    assert [origin(shard.manifest, i) for i in range(len(TEXTS))] == [Origin("a.ds", number) for number in numbers]
    assert shard.manifest.rejected == {"empty": 2} and shard.manifest.sources[0].records == len(TEXTS) + 2
    assert CliRunner().invoke(app, ["data", "verify", str(tmp_path)]).exit_code == 0


def test_adopted_file_is_found_by_its_own_name(tmp_path, documents, tokenizer_file):
    for name, save in (("bare", lambda path, ids: ids.tofile(path)), ("numpy", np.save)):
        path = tmp_path / f"{name}.npy"
        save(path, np.concatenate(documents).astype("uint16"))
        manifest = adopt(path, tokenizer_file).manifest
        assert places_of(manifest, source_called(str(path), manifest.sources), 5) == [4]


@pytest.mark.parametrize("size", [4, 5])
def test_adoption_overwrites_no_other_tokens(tmp_path, documents, tokenizer_file, size):
    path = tmp_path / "a.npy"
    np.save(path, np.concatenate(documents).astype("uint16"))
    adopt(path, tokenizer_file)
    assert same(adopt(path, tokenizer_file), documents)  # once more
    other = np.arange(size, dtype="uint16").tobytes()
    (tmp_path / "a.bin").write_bytes(other)
    np.save(path, np.arange(1, 5, dtype="uint16"))
    with pytest.raises(InputError, match=r"a\.bin: is there, and is not a\.npy"):
        adopt(path, tokenizer_file)
    assert (tmp_path / "a.bin").read_bytes() == other


def test_a_datatrove_pipeline_writes_shards(tmp_path, tokenizer_file):
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")
    from datatrove.data import Document

    from megatron_blackmamba.data_tools.datatrove_step import ShardWriter

    for rank in range(2):
        found = [Document(text=text, id=str(i)) for i, text in enumerate(TEXTS[rank::2])]
        ShardWriter(tmp_path / "out", str(tokenizer_file), seed=1).run(found, rank, 2)
    shards = find_shards(tmp_path / "out")
    assert [(s.manifest.shard, s.manifest.shards, s.manifest.documents) for s in shards] == [(1, 2, 25), (2, 2, 25)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")) == []
    printed = CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "out"), "--count", "50", "--json"])
    shown = [json.loads(line) for line in printed.stdout.splitlines()]
    assert sorted(each["text"] for each in shown) == sorted(TEXTS)
    assert all(TEXTS[2 * each["record"] - 2 + int(each["source"][-1])] == each["text"] for each in shown)
    with pytest.raises(InputError, match="task 5 has no document"):
        ShardWriter(tmp_path / "out", str(tokenizer_file)).run([], 5, 6)
    some = [Document(text=text, id=text) for text in ("", "one")]
    ShardWriter(tmp_path / "some", str(tokenizer_file), max_bad="1").run(some)
    assert find_shards(tmp_path / "some")[0].manifest.rejected == {"empty": 1}


def test_lengths_are_shown_by_source(tmp_path, run, write_jsonl, tokenizer):
    lengths = {}
    for name, texts in (("short", TEXTS[:9]), ("long", [text * 3 for text in TEXTS])):
        run(write_jsonl(f"{name}.jsonl", texts), out=f"tokens/{name}")
        lengths[name] = [1 + len(tokenizer.encode(text)) for text in texts]
    (tmp_path / "tokens/mix.yaml").write_text("sources: [{name: short, shards: short}, {name: long, shards: long}]")
    (tmp_path / "tokens/mix").symlink_to("mix.yaml")  # a mixture file may have any name
    assert [found.source for found in by_source([str(tmp_path / "tokens/mix")])] == [*lengths]
    for found in by_source([str(tmp_path / "tokens/mix.yaml")]):
        expected = np.array(lengths[found.source])
        assert (found.documents, found.tokens) == (len(expected), expected.sum())
        assert (found.shortest, found.mean, found.longest) == (expected.min(), expected.mean(), expected.max())
        assert found.quantiles[0.5] in expected and abs((expected <= found.quantiles[0.5]).mean() - 0.5) < 0.2
        for power, count in enumerate(found.counts):
            assert count == ((expected >= 2**power) & (expected < 2 ** (power + 1))).sum()
    printed = CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "tokens"), "--lengths"]).stdout
    assert f"{tmp_path}/tokens/short: 9 documents" in printed and "#" in printed
    shown = json.loads(
        CliRunner().invoke(app, ["data", "inspect", str(tmp_path / "tokens/short"), "--lengths", "--json"]).stdout
    )
    assert shown[0]["documents"] == 9
    run(write_jsonl("one.jsonl", TEXTS[:1]), out="one")
    (one,) = by_source([str(tmp_path / "one")])
    assert one.mean == one.shortest == one.longest == one.tokens
