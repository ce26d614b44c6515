"""The model `blackmamba` gives lm-eval the numbers that its `hf` backend gives."""

import pytest

from megatron_blackmamba.evaluation import EvaluationError, workers
from megatron_blackmamba.evaluation.tasks import load_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")

LIMIT = {"max_gen_toks": 12}


@pytest.fixture
def huggingface():
    """lm-eval's own backend, whose import takes seconds."""
    return pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError, reason="accelerate is missing")


@pytest.mark.parametrize("pattern", ["MEME", "ME*-ME"])
def test_scores_equal_those_of_the_hf_backend(huggingface, export, data, pattern):
    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    folder = export(pattern)
    theirs = huggingface.HFLM(
        pretrained=str(folder), trust_remote_code=True, device="cpu", dtype="float32", batch_size=3
    )
    ours = BlackMambaLM(folder, dtype="fp32", device="cpu")
    assert theirs.max_length == ours.max_length
    for task in load_tasks(["piqa", "winogrande", "lambada_openai"], data, download=False):
        task.task.build_all_requests()
        expected = theirs.loglikelihood(task.task.instances, disable_tqdm=True)
        found = ours.loglikelihood(task.task.instances)
        assert [score[0] for score in found] == pytest.approx([score[0] for score in expected], abs=1e-4)
        assert [score[1] for score in found] == [score[1] for score in expected]


def test_a_dtype_is_a_known_name_or_auto(export):
    from megatron_blackmamba.evaluation.errors import EvaluationError
    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    assert BlackMambaLM(export("MEME"), dtype="auto", device="cpu").dtype == BlackMambaLM(export("MEME")).dtype
    with pytest.raises(EvaluationError, match=r"dtype=fp8: no such type\. Choose one of auto, bf16"):
        BlackMambaLM(export("MEME"), dtype="fp8", device="cpu")


def test_several_processes_score_only_if_told(export):
    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    one, two = (BlackMambaLM(export("MEME"), device="cpu", nproc=processes) for processes in (1, 2))
    assert isinstance(one.scorer, workers.Here)
    assert isinstance(two.scorer, workers.Pool) and two.scorer.processes == 2
    two.close()


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_every_process_keeps_a_named_device(device):
    assert {workers._device(device, number) for number in range(3)} == {device}


def test_rolling_likelihood_equals_that_of_the_hf_backend(huggingface, export):
    from lm_eval.api.instance import Instance

    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    folder = export("MEME")
    theirs = huggingface.HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu", dtype="float32")
    text = "so a model reads once and answers what then they said " * 4  # longer than the model's 64 tokens
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0, ("task", 0, 1))]
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    ours = BlackMambaLM(folder, dtype="fp32", device="cpu")
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-3)


def test_lm_eval_finds_the_model_by_name(export, data):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from megatron_blackmamba.evaluation import __main__  # noqa: F401  lm-eval's command line with the model

    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data / "piqa.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{goal}}",
        "doc_to_choice": "{{[sol1, sol2]}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    found = simple_evaluate(
        model="blackmamba",
        model_args=f"pretrained={export('MEME')},dtype=fp32",
        device="cpu",
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert 0 <= found["results"]["local"]["acc,none"] <= 1


def test_generation_equals_that_of_the_hf_backend(huggingface, export):
    from lm_eval.api.instance import Instance

    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    long = "so a model reads once and answers what then they said " * 4  # more than the model's 64 tokens
    asked = [
        ("so a model ", {"until": ["e"], **LIMIT, "do_sample": False}),
        ("so a model ", {"until": "ea", "max_new_tokens": 9}),
        (long, {"until": [], **LIMIT}),
    ]
    requests = [Instance("generate_until", {}, one, i, ("task", i, 1)) for i, one in enumerate(asked)]
    theirs = huggingface.HFLM(pretrained=str(export("MEME")), trust_remote_code=True, device="cpu", dtype="float32")
    ours = BlackMambaLM(export("MEME"), dtype="fp32", device="cpu")
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("how", [{"do_sample": True}, {"temperature": 0.7}])
def test_a_task_that_samples_is_refused(export, how):
    from lm_eval.api.instance import Instance

    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    requests = [Instance("generate_until", {}, ("so a model ", LIMIT | how), 0, ("task", 0, 1))]
    with pytest.raises(EvaluationError, match="writes greedily: set do_sample: false"):
        BlackMambaLM(export("MEME"), device="cpu").generate_until(requests)


def test_generation_ends_after_256_tokens_by_default(export, monkeypatch):
    from lm_eval.api.instance import Instance

    from megatron_blackmamba.evaluation import harness

    monkeypatch.setattr(harness.Generator, "generate", lambda *_, max_new_tokens, **more: str(max_new_tokens))
    requests = [Instance("generate_until", {}, ("so", given), i, ("task", i, 1)) for i, given in enumerate(({}, LIMIT))]
    model = harness.BlackMambaLM(export("MEME"), device="cpu", max_length=512)
    assert model.generate_until(requests) == ["256", "12"]


def test_contexts_without_room_are_refused(export):
    from lm_eval.api.instance import Instance

    from megatron_blackmamba.evaluation.harness import BlackMambaLM

    requests = [Instance("generate_until", {}, ("so a model ", {"max_gen_toks": 64}), 0, ("task", 0, 1))]
    with pytest.raises(EvaluationError, match="max_gen_toks=64 leaves nothing of max_length=64"):
        BlackMambaLM(export("MEME"), dtype="fp32", device="cpu").generate_until(requests)
