"""The readers of other tools read our files: megatron-core token shards, datatrove and pyarrow clean text."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.data_tools import parts

pytestmark = pytest.mark.xdist_group("foreign_readers")
IDS = [[3, 4, 5, 0], [6, 0], [7, 8, 0]]
OPTIONS = ["--part-size", "1KB", "--workers", "1", "--max-bad", "1", "--prefer", "a*"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def data(*arguments):
    done = CliRunner().invoke(app, ["data", *map(str, arguments)])
    if done.exception:
        raise done.exception
    return done.stdout


def by_megatron(prefix):
    """Return the documents of a shard as megatron-core reads them."""
    reader = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dataset = reader.IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [ids.tolist() for ids in dataset[0 : len(dataset)]]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("name", ["a.ds", "a.npy", "a.npy with a header"])
def test_megatron_reads_adopted_files(tmp_path, tokenizer_file, name, dtype):
    path, tokens = tmp_path / name.split()[0], np.concatenate(IDS).astype(dtype)
    np.save(path, tokens) if "header" in name else tokens.tofile(path)
    if path.suffix == ".ds":
        np.cumsum([len(ids) for ids in IDS]).astype("<u8").tofile(f"{path}.index")
    data("adopt", path, "-t", tokenizer_file, "--dtype", dtype)
    assert by_megatron(tmp_path / "a") == IDS


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    """A cleaned corpus, the texts that it keeps, and the number of records that it lists; the last part keeps none."""
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")
    folder, choose = tmp_path_factory.mktemp("cleaned"), random.Random(0)
    words = ["".join(choose.choices(LETTERS, k=6)) for _ in range(500)]
    texts = [" ".join(choose.choices(words, k=60)) for _ in range(20)]
    texts[3] += ' "quotes", a\ttab,\r\na line and a \u2028 \N{ROCKET} of three bytes or more'
    (folder / "raw").mkdir()
    for name, part in (('a \t"1".jsonl', texts), ("b.jsonl", texts[:5])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (folder / "raw" / name).write_text("".join([*lines, '{"text": ""}\n', "\n", '{"other": "x\\ty"}\n']))
    counts = json.loads(data("dedup", folder / "raw", folder / "clean", *OPTIONS, "--json"))
    assert (counts["kept"], counts["removed"], counts["skipped"]) == (20, 5, 6)
    return folder, texts


def test_datatrove_reads_a_cleaned_corpus(cleaned):
    from datatrove.pipeline.readers import JsonlReader

    folder, texts = cleaned
    found = list(JsonlReader(str(folder / "clean"), glob_pattern="*.jsonl.zst").run())
    assert [document.text for document in found] == texts
    assert found[3].metadata["file"] == 'a \t"1".jsonl' and found[3].metadata["record"] == 4


def test_pyarrow_reads_every_cleaned_part(cleaned):
    folder, texts = cleaned
    tables = [pyarrow.json.read_json(path) for path in sorted((folder / "clean").glob("*.jsonl.zst"))]
    table = pa.concat_tables(tables)
    assert table.column_names == ["text", "file", "record"] and table["text"].to_pylist() == texts


def test_pyarrow_reads_the_list_of_removals(cleaned):
    folder, _ = cleaned
    table = pyarrow.csv.read_csv(
        folder / "clean" / parts.REMOVED, parse_options=pyarrow.csv.ParseOptions(delimiter="\t")
    )
    rows = table.to_pylist()
    assert tuple(table.column_names) == parts.COLUMNS
    assert [(row["file"], row["record"], row["resembles"]) for row in rows[:5]] == [
        ("b.jsonl", i, f'a \t"1".jsonl:{i}') for i in range(1, 6)
    ]
    assert [row["reason"] for row in rows[5:]].count("missing field") == 2


def test_a_corpus_without_an_empty_part_goes_on(cleaned, run, tmp_path):
    """A second command reads the folder, and the same command accepts it as finished."""
    folder, texts = cleaned
    assert [path.name for path in (folder / "clean").glob("part_*")] == ["part_00001.jsonl.zst"]
    again = data("dedup", folder / "raw", folder / "clean", *OPTIONS)
    assert "kept 20 documents, removed 5" in again
    assert run(folder / "clean", shard_size="1B").documents == len(texts)


def test_megatron_reads_shards_of_a_datatrove_pipeline(tmp_path, tokenizer_file, tokenizer):
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install megatron-blackmamba[dedup]")
    from datatrove.data import Document

    from megatron_blackmamba.data_tools.datatrove_step import ShardWriter

    texts = [f"import json {i}" for i in range(9)]
    found = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
    ShardWriter(tmp_path, str(tokenizer_file)).run(found, 0, 1)
    documents = by_megatron(tmp_path / "shard_00001")
    assert sorted(tokenizer.decode(ids[:-1]) for ids in documents) == sorted(texts)
