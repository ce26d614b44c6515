"""The worked example of docs/extending.md: a preset for a new corpus."""

import gzip
import json
import runpy
from pathlib import Path

from megatron_blackmamba.data_tools.sources import PRESETS


def test_new_preset_reads_its_corpus(run, tmp_path, tokenizer, monkeypatch):
    for name in PRESETS.copy():
        monkeypatch.setitem(PRESETS, name, PRESETS[name])  # so that what the example adds goes again
    monkeypatch.setitem(PRESETS, "forum", None)
    runpy.run_path(str(Path(__file__).parent / "new_preset.py"))
    folder = tmp_path / "forum"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": "an answer", "title": "not this"}) + "\n")
    (folder / "notes.txt").write_text("not this either")
    summary = run(str(folder), preset="forum")
    assert summary.tokens == len(tokenizer.encode("an answer")) + 1
    assert summary.documents == 1
