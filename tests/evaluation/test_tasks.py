"""Local files become the documents of lm-eval's tasks."""

import json

import pytest

from megatron_blackmamba.evaluation.tasks import load_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")

RAW = {"activity_label": "Running", "ctx_a": "He", "ctx_b": "now", "endings": ["runs", "flies"], "label": "0"}
PROCESSED = {"query": "Running: He Now", "choices": ["runs", "flies"], "label": "0"}


@pytest.mark.parametrize("document", [RAW, PROCESSED], ids=["raw", "processed"])
def test_a_single_document_is_processed_at_most_once(document, tmp_path):
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(document))
    (loaded,) = load_tasks(["hellaswag"], tmp_path, download=False)
    (found,) = loaded.task.test_docs()
    assert {key: found[key] for key in PROCESSED} == PROCESSED
