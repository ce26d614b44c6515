"""The text for the measurement of `data dedup`."""

import json

from benchmarks.cleaning_scale import FILES, LONGEST, write_corpus


def test_little_text_is_varied_to_the_size(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.py").write_text("x = 1  # a line\n" * 3000)
    (tmp_path / "in/b.bin").write_text("not text\n" * 100)
    corpus = write_corpus([tmp_path / "in"], tmp_path / "out", 100_000)
    files = sorted((tmp_path / "out").iterdir())
    texts = [json.loads(line)["text"] for file in files for line in file.open()]
    assert len(files) == FILES and len(texts) == corpus["documents"]
    assert sum(map(len, texts)) >= 100_000 and max(map(len, texts[:3])) <= LONGEST
    assert "".join(texts[:3]) == "x = 1  # a line\n" * 3000 and len(set(texts)) > 3
    assert not any("not text" in text for text in texts)
