import gzip
import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_blackmamba.data_tools import readers, rejects, streams
from megatron_blackmamba.data_tools.readers import JsonLines, Reader, ReadOptions, Text
from megatron_blackmamba.data_tools.rejects import InputError

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def read(path, format="jsonl", options=None):
    """All documents with their record numbers, and all rejects."""
    rejected = []
    reader = Reader(path, format, options or ReadOptions(), lambda *bad: rejected.append(bad))
    documents = [pair for batch in reader.batches() for pair in zip(batch.numbers, batch.texts, strict=True)]
    return documents, rejected


def fed_in_pieces(parser, content, cuts):
    """Documents of a parser that gets `content` cut at these places."""
    borders = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    batches = []
    for low, high in itertools.pairwise(borders):
        batches += parser.feed(content[low:high])
    batches += parser.finish()
    return [pair for batch in batches for pair in zip(batch.numbers, batch.texts, strict=True)]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(any_text, max_size=8),
    st.lists(st.integers(0, 10**6), max_size=6),
    st.sampled_from([1, 30, 8 << 20]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_json_lines_come_through_however_they_are_cut(texts, cuts, batch_bytes, newline, ended):
    content = newline.join(json.dumps({"id": 1, "text": text}) for text in texts) + newline * ended
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BATCH_BYTES", batch_bytes)
        parser = JsonLines(ReadOptions(), lambda number, reason, detail: pytest.fail(reason) if texts else None)
        assert fed_in_pieces(parser, content.encode(), cuts) == list(enumerate(texts, start=1))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(any_text.filter(lambda text: text.strip() and "<end>" not in text), min_size=1, max_size=8),
    st.lists(st.integers(0, 10**6), max_size=6),
    st.sampled_from([1, 30, 8 << 20]),
    st.booleans(),
)
def test_pieces_do_not_depend_on_read_size(texts, cuts, batch_bytes, ended):
    content = "<end>".join(texts) + "<end>\n" * ended
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BATCH_BYTES", batch_bytes)
        parser = Text(ReadOptions(marker="<end>"), lambda *bad: pytest.fail(str(bad)))
        documents = fed_in_pieces(parser, content.encode(), cuts)
    expected = [text.removeprefix("\ufeff") if i == 0 else text for i, text in enumerate(texts)]
    assert documents == list(enumerate(expected, start=1))


def test_documents_leave_memory_as_soon_as_they_end(monkeypatch):
    monkeypatch.setattr(readers, "BATCH_BYTES", 10)
    parser = Text(ReadOptions(marker="|"), lambda *bad: pytest.fail(str(bad)))
    assert [batch.texts for batch in parser.feed(b"one|two|thr")] == [["one", "two"]]
    assert list(parser.feed(b"ee and more")) == []
    assert [batch.texts for batch in parser.feed(b"|four")] == [["three and more"]]
    assert [batch.texts for batch in parser.finish()] == [["four"]]
    lines = JsonLines(ReadOptions(), lambda *bad: pytest.fail(str(bad)))
    assert [batch.texts for batch in lines.feed(b'{"text": "a"}\n{"te')] == [["a"]]


@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_a_record_that_never_ends_is_refused(format, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST_RECORD", 100 << 20)
    path = tmp_path / "endless.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "so"}\n' if format == "jsonl" else b"")
        for _ in range(120):
            file.write(b"x" * (1 << 20))
    number = 2 if format == "jsonl" else 1
    with pytest.raises(InputError, match=f"endless.gz: record {number} is longer than 104,857,600 bytes"):
        read(path, format)


def test_a_large_text_without_marker_is_one_document(monkeypatch):
    monkeypatch.setattr(readers, "BATCH_BYTES", 10)
    parser = Text(ReadOptions(), lambda *bad: pytest.fail(str(bad)))
    assert list(parser.feed(b"more than ten")) == []
    assert [batch.texts for batch in parser.finish()] == [["more than ten"]]


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.lists(st.integers(0, 10**6), max_size=4))
def test_arbitrary_bytes_are_read_or_rejected_by_line(content, cuts):
    rejected = []
    parser = JsonLines(ReadOptions(), lambda number, *_: rejected.append(number))
    taken = [number for number, _ in fed_in_pieces(parser, content, cuts)]
    lines = len(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
    complete = content.removeprefix(b"\xef\xbb\xbf").endswith(b"\n") or not content.removeprefix(b"\xef\xbb\xbf")
    if not content.startswith(b"\xef"):  # a byte-order mark may itself be cut in two
        assert sorted(taken + rejected) == list(range(1, lines + 1 - complete))


GOOD = b'{"text": "good"}'
BAD_LINES = {
    b'{"text": "x"': rejects.INVALID_JSON,
    b"[": rejects.INVALID_JSON,
    b'{"text": "x"} {"text": "y"}': rejects.INVALID_JSON,
    b'{"content": "x"}': rejects.MISSING_FIELD,
    b'["x"]': rejects.MISSING_FIELD,
    b"null": rejects.MISSING_FIELD,
    b'{"text": null}': rejects.NOT_A_STRING,
    b'{"text": ["x"]}': rejects.NOT_A_STRING,
    b'{"text": 3, "other": NaN}': rejects.NOT_A_STRING,
    b'{"text": "\xff"}': rejects.INVALID_UTF8,
    b'{"text": "\xed\xa0\x80"}': rejects.INVALID_UTF8,  # a surrogate spelled in UTF-8
    b'{"text": "\\ud800"}': rejects.LONE_SURROGATE,
    b'{"text": "\\udc00 x"}': rejects.LONE_SURROGATE,
    b"   \t": rejects.BLANK,
    b"": rejects.BLANK,
    b'{"a":' * 100_000: rejects.INVALID_JSON,
}


@pytest.mark.parametrize("line, reason", BAD_LINES.items(), ids=lambda value: repr(value)[:30])
def test_bad_line_is_rejected_by_number_alone(line, reason, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([GOOD, line, GOOD, b""]))
    documents, rejected = read(tmp_path / "a.jsonl")
    assert documents == [(1, "good"), (3, "good")]
    assert [(number, why) for number, why, _ in rejected] == [(2, reason)]


@pytest.mark.parametrize(
    "line",
    [b'{"text": "good", "score": NaN}', b'{"text": "good", "big": 1e999}', b'{"text": "good", "other": "\\ud800"}'],
)
def test_odd_extra_fields_do_not_lose_the_text(line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    assert read(tmp_path / "a.jsonl") == ([(1, "good")], [])


@pytest.mark.parametrize("cut", [b'{"text": "go', '{"text": "é'.encode()[:-1]])
def test_truncated_last_line_differs_from_bad_json(cut, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n" + cut)
    documents, rejected = read(tmp_path / "a.jsonl")
    assert documents == [(1, "good")]
    assert [(number, why) for number, why, _ in rejected] == [(2, rejects.TRUNCATED_LINE)]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfgood")
    assert read(tmp_path / "a.jsonl")[0] == read(tmp_path / "a.txt", "text")[0] == [(1, "good")]


def test_appended_files_may_begin_with_byte_order_mark(tmp_path):
    marked = b"\xef\xbb\xbf" + GOOD + b"\n"
    (tmp_path / "a.jsonl").write_bytes(marked + marked + b"\xef\xbb\xbf\n")
    documents, rejected = read(tmp_path / "a.jsonl")
    assert documents == [(1, "good"), (2, "good")]
    assert [(number, why) for number, why, _ in rejected] == [(3, rejects.BLANK)]


def test_only_the_first_byte_order_mark_is_dropped():
    mark = b"\xef\xbb\xbf"
    content = mark + b'{"text": "a' + mark + b'b"}'
    parser = JsonLines(ReadOptions(), lambda *bad: pytest.fail(str(bad)))
    assert fed_in_pieces(parser, content, [content.rindex(mark)]) == [(1, "a\ufeffb")]


def test_files_of_another_kind_get_a_hint(tmp_path):
    (tmp_path / "array.jsonl").write_text('[\n {"text": "x"}\n]')
    (tmp_path / "plain.jsonl").write_text("Call me Ishmael.\n")
    (tmp_path / "mac.jsonl").write_bytes(b"\r".join([GOOD, GOOD, b""]))
    assert "tr '\\r'" in read(tmp_path / "mac.jsonl")[1][0][2]
    assert "jq" in read(tmp_path / "array.jsonl")[1][0][2]
    assert "--format text" in read(tmp_path / "plain.jsonl")[1][0][2]


@pytest.mark.parametrize("keep", [0.3, 0.999])
def test_truncated_archive_yields_whole_records_and_one_reject(keep, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_READ_BYTES", 100)
    texts = [f"document {i} of many" for i in range(300)]
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: int(len(whole) * keep)])
    documents, rejected = read(tmp_path / "a.jsonl.gz")
    assert documents == list(enumerate(texts, start=1))[: len(documents)]
    assert 0 < len(documents) <= 300
    assert [(number, why) for number, why, _ in rejected] == [(len(documents) + 1, rejects.TRUNCATED_FILE)]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\r\n\nline ")
    assert read(tmp_path / "a.txt", "text") == ([(1, "line\r\n\nline ")], [])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"line")[:-6])
    assert [why for _, why, _ in read(tmp_path / "b.txt.gz", "text")[1]] == [rejects.TRUNCATED_FILE]


def test_invalid_bytes_reject_one_piece_of_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one|\xff|  |three|")
    documents, rejected = read(tmp_path / "a.txt", "text", ReadOptions(marker="|"))
    assert documents == [(1, "one"), (4, "three")]
    assert [(number, why) for number, why, _ in rejected] == [(2, rejects.INVALID_UTF8), (3, rejects.BLANK)]


def test_parquet_yields_rows_and_rejects_nulls(tmp_path):
    column = pa.array(["one", None, "three"] * 50)
    meta = pa.array([{"title": "T"}] * 150)
    pq.write_table(pa.table({"content": column, "meta": meta}), tmp_path / "a.parquet", row_group_size=40)
    documents, rejected = read(tmp_path / "a.parquet", "parquet", ReadOptions(fields=("content",)))
    assert [text for _, text in documents] == ["one", "three"] * 50
    assert [number for number, _ in documents[:3]] == [1, 3, 4]
    assert [(number, why) for number, why, _ in rejected] == [(n, rejects.NOT_A_STRING) for n in range(2, 150, 3)]
    documents, _ = read(tmp_path / "a.parquet", "parquet", ReadOptions(fields=("meta.title", "content")))
    assert documents[0] == (1, "T\n\none")


def test_truncated_parquet_or_missing_column_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["one", "two"]}), path)
    with pytest.raises(InputError, match=r"no column `text`; it has content\. .*--field"):
        read(path, "parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not a complete parquet file"):
        read(path, "parquet", ReadOptions(fields=("content",)))


def test_row_batches_have_similar_sizes(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{i} " * 400_000 for i in range(20)]}), path, compression="none")
    sizes = []
    for batch in Reader(path, "parquet", ReadOptions(), pytest.fail).batches():
        sizes.append(sum(map(len, batch.texts)))
    assert max(sizes) < 4 * readers.BATCH_BYTES and len(sizes) > 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_file_that_changes_while_read_is_noticed(tmp_path, name):
    path, texts = tmp_path / name, ["one", "two"]

    def write(texts):
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"text": texts}), path)
        else:
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    write(texts)
    size = path.stat().st_size
    batches = Reader(path, "parquet" if path.suffix == ".parquet" else "jsonl", ReadOptions(), pytest.fail).batches()
    assert next(batches).texts == texts
    write(["abc", "def"])
    assert path.stat().st_size == size
    with pytest.raises(InputError, match=f"{name}: changed while it was read: another program is writing to it, or"):
        list(batches)


def test_bad_record_is_explained_by_a_changed_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + b"x" * 20)

    def reject(record, reason, detail):
        raise InputError("a bad record")

    batches = Reader(path, "jsonl", ReadOptions(), reject).batches()
    next(batches)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(InputError, match="changed while it was read"):
        list(batches)


def test_fields_without_name_and_empty_markers_are_refused():
    for fields in ((), ("text", "")):
        with pytest.raises(InputError, match="--field needs the name of a field"):
            ReadOptions(fields=fields)
    with pytest.raises(InputError, match="--marker needs some text"):
        ReadOptions(marker="")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252", "shift_jis"])
def test_other_encodings_are_read(tmp_path, encoding):
    text = "日本語の文" * 700_000 if encoding == "shift_jis" else "Füße naïve " * 5
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.jsonl").write_bytes((json.dumps({"text": "Füße"}, ensure_ascii=False) + "\n").encode("utf-16"))
    documents, _ = read(tmp_path / "a.txt", "text", ReadOptions(encoding=encoding))
    assert documents == [(1, text)]
    assert read(tmp_path / "b.jsonl", "jsonl", ReadOptions(encoding="utf-16"))[0] == [(1, "Füße")]


def test_wrong_encodings_are_refused(tmp_path, run):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 3)
    with pytest.raises(InputError, match="--encoding latin-11: no such character encoding; did you mean latin_1"):
        run(tmp_path / "a.txt", encoding="latin-11")
    with pytest.raises(InputError, match=r"a\.txt: near byte 3: not ascii\. Choose another --encoding"):
        run(tmp_path / "a.txt", encoding="ascii")
    with pytest.raises(InputError, match="--encoding base64: no such character encoding"):
        run(tmp_path / "a.txt", encoding="base64")
    assert run(tmp_path / "a.txt", encoding="latin-1").documents == 1
    with pytest.raises(InputError, match="was made with encoding = 'iso8859-1', not 'cp1252'"):
        run(tmp_path / "a.txt", encoding="cp1252")
