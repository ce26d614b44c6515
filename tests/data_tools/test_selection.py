import pytest

from megatron_blackmamba.data_tools.sources import Selection, split_of


@pytest.mark.parametrize(
    "path, split",
    [
        ("train/a.jsonl", "train"),
        ("val.jsonl.zst", "validation"),
        ("data/v2/validation-00000-of-00002.json.gz", "validation"),
        ("dev/proofpile_dev.jsonl.gz", "validation"),
        ("Test/a.jsonl", "test"),
        ("wiki.valid.txt", "validation"),
        ("train/x/test/y.jsonl", "test"),
        ("contest/latest.jsonl", None),
        ("trained/evaluation.jsonl", None),
        ("a.jsonl", None),
    ],
)
def test_a_path_names_its_split(path, split):
    assert split_of(path) == split


@pytest.mark.parametrize(
    "pattern, taken",
    [
        ("*.md", {"a.md", "docs/b.md", "docs/api/c.md"}),
        ("docs/*", {"docs/b.md", "docs/api/c.md", "docs/d.rst"}),
        ("api/*.md", {"docs/api/c.md"}),
        ("./docs/*.rst", {"docs/d.rst"}),
        ("*.rst|a.*", {"a.md", "docs/d.rst"}),
        ("docs", set()),
    ],
)
def test_patterns_match_names_and_paths(tmp_path, pattern, taken):
    paths = {"a.md", "docs/b.md", "docs/api/c.md", "docs/d.rst"}

    def chosen(selection):
        return {path for path in paths if selection.takes(path, tmp_path.name)}

    assert chosen(Selection(match=pattern)) == taken
    assert chosen(Selection(exclude=(pattern,))) == paths - taken
