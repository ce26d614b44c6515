import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_blackmamba.data_tools import readers, unfolding
from megatron_blackmamba.data_tools.readers import Reader, ReadOptions
from megatron_blackmamba.data_tools.rejects import INVALID_UTF8, MISSING_FIELD, NOT_A_STRING, InputError
from megatron_blackmamba.data_tools.sources import find_sources
from megatron_blackmamba.formats.shards import ShardManifest
from tests.data_tools.test_readers import read

TEXTS = [f"the text of document {i}" for i in range(200)]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
def test_utf8_in_binary_columns_is_text(tmp_path, kind):
    values = [text.encode() for text in TEXTS]
    values[7] = b"caf\xe9"
    pq.write_table(pa.table({"text": pa.array(values, pa.binary()).cast(kind, safe=False)}), tmp_path / "a.parquet")
    documents, rejected = read(tmp_path / "a.parquet", "parquet")
    assert documents == [(i, text) for i, text in enumerate(TEXTS, 1) if i != 8]
    assert [(number, reason) for number, reason, _ in rejected] == [(8, INVALID_UTF8)]


def test_nested_binary_is_text(tmp_path):
    table = pa.table({"parts": [[{"text": b"one"}, {"text": b"two"}]]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "parquet", ReadOptions(fields=("parts[].text",)))[0] == [(1, "one\n\ntwo")]


def test_a_flipped_bit_fails_the_page_checksum(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": TEXTS})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    assert len(read(path, "parquet")[0]) == 200
    content = bytearray(path.read_bytes())
    content[content.index(b"document 100") + 10] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a.parquet, after row 0: .*(CRC|crc|checksum).*download it again"):
        read(path, "parquet")


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "text", "id"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="has two columns `text`: rename one"):
        read(tmp_path / "a.parquet", "parquet")
    assert read(tmp_path / "a.parquet", "parquet", ReadOptions(fields=("id",)))[0] == [(1, "c")]


def write_arrow(path, table, new=pa.ipc.new_stream):
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=60)


@pytest.fixture
def saved(tmp_path):
    """A folder as `datasets.DatasetDict.save_to_disk` writes it."""
    for split, texts in (("train", TEXTS[:150]), ("validation", TEXTS[150:])):
        (tmp_path / "saved" / split).mkdir(parents=True)
        write_arrow(tmp_path / f"saved/{split}/data-00000-of-00001.arrow", pa.table({"text": texts, "id": texts}))
        for name in ("dataset_info.json", "state.json"):
            (tmp_path / "saved" / split / name).write_text("{}")
    (tmp_path / "saved/dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    return tmp_path / "saved"


def test_folders_of_save_to_disk_are_read(run, saved, tmp_path):
    with pytest.raises(InputError, match=r"the splits train, validation: choose one with --split train, or .* all"):
        run(saved)
    assert run(saved, split="all").documents == 200
    assert run(saved / "train", out="alone").documents == 150
    assert run(saved, out="training", split="train").documents == 150
    manifest = ShardManifest.read(tmp_path / "out/shard_00001.manifest.json")
    assert manifest.options["formats"] == ["arrow"] and manifest.not_taken == 5
    assert [source.format for source in find_sources([str(saved)]).sources] == ["arrow", "arrow"]


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files_and_streams_give_their_rows(tmp_path, new):
    path = tmp_path / "a.arrow"
    write_arrow(path, pa.table({"id": list(range(200)), "text": [*TEXTS[:199], None]}), new)
    documents, rejected = read(path, "arrow")
    assert documents == list(enumerate(TEXTS[:199], 1))
    assert [(number, reason) for number, reason, _ in rejected] == [(200, NOT_A_STRING)]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match="download it again"):
        read(path, "arrow")


@pytest.mark.parametrize(
    "content", [b"no Arrow", b"\xff\xff\xff\xff\x10\0\0\0" + b"junk" * 9, b"ARROW1\0\0" + b"7" * 99]
)
def test_junk_named_arrow_is_refused_by_name(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(InputError, match=rf"{tmp_path}/a\.arrow: not a complete Arrow file"):
        read(tmp_path / "a.arrow", "arrow")


def test_an_empty_arrow_file_is_refused(tmp_path):
    (tmp_path / "a.arrow").touch()
    with pytest.raises(InputError, match=r"a\.arrow: is empty\. Download it again"):
        read(tmp_path / "a.arrow", "arrow")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_optional_fields_may_be_missing_or_null(tmp_path, format):
    rows = [{"title": "T", "text": "a"}, {"title": None, "text": "b"}, {"title": "U", "text": None}]
    path = tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "c"}, {"title": 3, "text": "d"}]))
    documents, rejected = read(path, format, ReadOptions(fields=("title?", "subtitle?", "text"), joiner="|"))
    assert documents == [(1, "T|a"), (2, "b")] + [(4, "c")] * (format == "jsonl")
    assert [bad[:2] for bad in rejected] == [(3, NOT_A_STRING)] + [(5, NOT_A_STRING)] * (format == "jsonl")


def test_a_record_without_any_optional_field_is_rejected(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "T"}\n{"id": 1}\n"text"\n')
    documents, rejected = read(tmp_path / "a.jsonl", "jsonl", ReadOptions(fields=("title?", "text?")))
    assert documents == [(1, "T")]
    assert [bad[:2] for bad in rejected] == [(2, MISSING_FIELD), (3, MISSING_FIELD)]
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no column `title`; it has id"):
        read(tmp_path / "a.parquet", "parquet", ReadOptions(fields=("title?", "text?")))


@pytest.mark.parametrize(
    "first, advice", [("{", "`jq -c .` makes"), ("[", "`jq -c '.[]'` makes"), ("WARC/1.0", "WarcReader")]
)
def test_multiline_json_suggests_the_jq_command(tmp_path, first, advice):
    (tmp_path / "a.jsonl").write_text(f'{first}\n  "text": 1\n')
    ((_, _, detail), *_) = read(tmp_path / "a.jsonl")[1]
    assert advice in detail


def test_a_warc_file_says_what_to_use(tmp_path):
    (tmp_path / "a.warc.gz").touch()
    with pytest.raises(InputError, match=r"WARC files hold web pages.*WarcReader"):
        find_sources([str(tmp_path / "a.warc.gz")])


ROWS, LONG = 65_536, "x" * 300_000  # 20 GB of text in less than a kilobyte
FOLDED = {
    "text": lambda folded: folded,
    "nested": lambda folded: pa.StructArray.from_arrays([folded], ["text"]),
    "list": lambda folded: pa.ListArray.from_arrays(pa.array(range(ROWS + 1), pa.int32()), folded),
}


@pytest.mark.parametrize("kind", FOLDED)
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_one_string_in_every_row_fills_no_memory(format, kind, tmp_path):
    folded = pa.DictionaryArray.from_arrays(pa.array([1, None, *[0] * (ROWS - 2)], pa.int32()), pa.array([LONG, "so"]))
    table, path = pa.table({"text": FOLDED[kind](folded)}), tmp_path / f"bomb.{format}"
    if format == "arrow":
        write_arrow(path, table)
    else:
        if kind != "text":  # pyarrow writes these plain
            table = pa.table(
                {
                    "text": pa.array(
                        table.column(0).combine_chunks().slice(0, 200).to_pylist(), table.schema.field(0).type
                    )
                }
            )
        pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=2**30)
        assert path.stat().st_size < 10_000
    field = {"text": "text", "nested": "text.text", "list": "text[]"}[kind]
    rejected = []
    batches = Reader(path, format, ReadOptions((field,)), lambda *record: rejected.append(record[:2])).batches()
    first, second = next(batches), next(batches)
    assert first.texts[0] == "so" and first.numbers[1] == 3 and rejected[0][0] == 2
    assert sum(map(len, first.texts)) < 2**20 and {*second.texts} == {LONG} and len(second.texts) == 3
    assert second.numbers[0] == first.numbers[-1] + 1
    if format == "parquet" and kind != "text":
        numbers = [number for batch in batches for number in batch.numbers]
        assert numbers == [*range(second.numbers[-1] + 1, 201)]


def test_a_row_beyond_the_bound_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unfolding, "LONGEST_RECORD", 1000)
    folded = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int32()), pa.array(["x" * 600, "y"]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), pa.concat_arrays([folded, folded.take([1, 1])]))
    write_arrow(tmp_path / "long.arrow", pa.table({"text": lists}))
    with pytest.raises(InputError, match=r"long.arrow, after row 0: a row holds 1,200 bytes of text"):
        read(tmp_path / "long.arrow", "arrow", ReadOptions(("text[]",)))


def test_text_bytes_count_every_occurrence():
    strings = pa.array(["abc", None, "", "é"])
    assert unfolding.text_bytes(strings).tolist() == [3, 0, 0, 2]
    lists = pa.array([["ab", "c"], None, [], ["d", None]])
    assert unfolding.text_bytes(lists).tolist() == unfolding.text_bytes(pa.concat_arrays([lists, lists])[4:]).tolist()
    assert unfolding.text_bytes(lists).tolist() == [3, 0, 0, 1]
    structs = pa.array([{"a": "ab", "b": 1}, None, {"a": None, "b": 2}])
    assert unfolding.text_bytes(structs).tolist() == [2, 0, 0]
    assert unfolding.text_bytes(strings.dictionary_encode()).tolist() == [3, 0, 0, 2]
    assert unfolding.text_bytes(pa.array([None, None]).cast(pa.string()).dictionary_encode()).tolist() == [0, 0]


def test_stream_cut_between_batches_is_refused(tmp_path):
    """pyarrow reads what is left of it without an error."""
    table = pa.table({"text": TEXTS})
    write_arrow(tmp_path / "whole.arrow", table)
    with pa.OSFile(str(tmp_path / "cut.arrow"), "wb") as file:
        writer = pa.ipc.new_stream(file, table.schema)
        writer.write_table(table[:120], max_chunksize=60)  # and is never closed
    assert (tmp_path / "whole.arrow").read_bytes().startswith((tmp_path / "cut.arrow").read_bytes())
    with pytest.raises(InputError, match=r"cut\.arrow: not a complete Arrow stream .*: download it again"):
        read(tmp_path / "cut.arrow", "arrow")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_table_is_hashed_after_it_is_read(tmp_path, monkeypatch, format):
    """A look at the first batch of a large file in object storage must not read all of it."""
    write = pq.write_table if format == "parquet" else lambda table, path: write_arrow(path, table)
    write(pa.table({"text": TEXTS}), tmp_path / "a")
    hashed = []
    monkeypatch.setattr(readers, "file_sha256", lambda path: hashed.append(path) or "hash")
    reader = Reader(tmp_path / "a", format, ReadOptions(), print)
    batches = reader.batches()
    assert next(batches).texts and not hashed
    assert list(batches) is not None and hashed and reader.sha256 == "hash"
