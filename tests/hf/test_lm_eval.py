"""lm-eval's `hf` backend runs an unmodified export, on local tasks and data without a network."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")
huggingface = pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError, reason="accelerate is missing")

QUESTIONS = [
    {"text": "the state of a model", "choices": [" runs on", " is a"], "gold": 0},
    {"text": "so", "choices": [" be it", " what then, they said"], "gold": 1},
]


def log_likelihood(model, tokenizer, context, continuation):
    before = len(tokenizer.encode(context))
    ids = torch.tensor([tokenizer.encode(context + continuation)])
    logits = model(ids).logits[0].log_softmax(-1)
    return sum(logits[t - 1, ids[0, t]].item() for t in range(before, ids.shape[1]))


def test_choices_score_what_the_model_gives_them(export, silu, tmp_path):
    from lm_eval.tasks import TaskManager

    folder = export(silu)
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    backend = huggingface.HFLM(
        pretrained=str(folder), trust_remote_code=True, device="cpu", dtype="float32", batch_size=2
    )
    assert backend.max_length == 2048
    results = lm_eval.simple_evaluate(
        model=backend, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question, sample in zip(QUESTIONS, results["samples"]["questions"], strict=True):
        expected = [log_likelihood(model, tokenizer, question["text"], choice) for choice in question["choices"]]
        assert [response[0] for response in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-4)
