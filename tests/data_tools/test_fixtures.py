"""Real text of every kind, with the tokenizer of the paper, from raw files to documents read back."""

import gzip
import json
import sys
import unicodedata
from pathlib import Path

import pytest

from megatron_blackmamba.data_tools.inspection import read_documents
from megatron_blackmamba.data_tools.tokenization import TokenizeOptions, tokenize
from megatron_blackmamba.data_tools.verification import verify
from tests.data_tools.conftest import SHARED

FIXTURES, TOKENIZER = SHARED / "fixtures", SHARED / "tokenizer" / "20B_tokenizer.json"
pytestmark = [
    pytest.mark.xdist_group("fixtures"),  # all is tokenized once, not once a worker
    pytest.mark.skipif(not (FIXTURES.exists() and TOKENIZER.exists()), reason="needs the text fixtures"),
]


def papers(pattern):
    """Full-text papers, one JSON file each, as JSON lines."""

    def find(folder):
        path = folder / "papers.jsonl"
        records = [json.loads(file.read_text()) for file in sorted((FIXTURES / "papers").glob(pattern))]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return [path]

    return find


def standard_library(_):
    return sorted(Path(sys.modules["json"].__file__).parents[1].glob("a*.py"))


KINDS = {
    "web": (lambda _: [*sorted((FIXTURES / "web").glob("*.jsonl")), FIXTURES / "web/000.json.gz"], {}),
    "wiki": (lambda _: sorted((FIXTURES / "wiki").glob("*.txt")), {"marker": "\n = "}),
    "papers": (papers("tests_s2orc_202*.json"), {"fields": ("abstract[].text", "body_text[].text")}),
    "papers 2019": (papers("tests_s2orc_2019*.json"), {"fields": ("metadata.title", "grobid_parse.body_text[].text")}),
    "math": (lambda _: [FIXTURES / "math/gsm8k-train.jsonl"], {"fields": ("question", "answer"), "joiner": "\n"}),
    "tex": (lambda _: sorted((FIXTURES / "math").glob("*.tex")), {"format": "text"}),
    "books": (lambda _: sorted((FIXTURES / "books").glob("*.txt")), {"preset": "pg19"}),
    "unicode": (lambda _: sorted((FIXTURES / "unicode").glob("*.txt")), {}),
    "code": (standard_library, {"format": "text"}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each kind tokenized once."""
    folders = {}
    for kind, (find, options) in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        paths = find(folder)
        summary = tokenize(paths, folder / "out", TokenizeOptions(tokenizer=str(TOKENIZER), quiet=True, **options))
        folders[kind] = (paths, folder / "out", summary)
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_text_goes_through_whole(kind, made):
    _, out, summary = made[kind]
    assert summary.documents > 0 and summary.tokens > summary.documents
    assert set(summary.rejected) <= {"blank"}
    assert [verdict.problems for verdict in verify([out], quiet=True)] == [[]]


@pytest.mark.parametrize("kind", ["books", "unicode", "code", "tex"])
def test_files_come_back_as_their_composed_form(kind, made):
    paths, out, summary = made[kind]
    by_name = {path.name: path for path in paths}
    documents = list(read_documents([str(out)], count=summary.documents))
    assert {document.origin.source for document in documents} == set(by_name)
    for document in documents:
        raw = by_name[document.origin.source].read_bytes().removeprefix(b"\xef\xbb\xbf").decode()
        assert document.text == unicodedata.normalize("NFC", raw)  # GPT-NeoX composes characters, and changes no more


def test_records_come_back_by_number(made):
    paths, out, _ = made["web"]
    for document in read_documents([str(out)], count=8, seed=0):
        path = next(path for path in paths if path.name == document.origin.source)
        content = path.read_bytes() if path.suffix == ".jsonl" else gzip.decompress(path.read_bytes())
        record = json.loads(content.split(b"\n")[document.origin.record - 1])
        assert document.text == unicodedata.normalize("NFC", record["text"])


def test_a_web_archive_is_not_taken_for_text(tmp_path):
    path = FIXTURES / "web/sample-0000.warc.gz"
    options = TokenizeOptions(tokenizer=str(TOKENIZER), quiet=True)
    with pytest.raises(ValueError, match="WARC files hold web pages"):
        tokenize([path], tmp_path, options)
    with pytest.raises(ValueError, match=r"sample-0000\.warc\.gz, record 1: .*WARC files hold web pages"):
        tokenize([path], tmp_path, TokenizeOptions(tokenizer=str(TOKENIZER), format="jsonl", quiet=True))
