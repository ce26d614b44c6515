"""Local files become the documents of lm-eval's tasks, and each has an answer that lm-eval can read."""

import json
from itertools import product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.evaluation import EvaluationError, tasks
from megatron_blackmamba.evaluation.tasks import PAPER, load_tasks
from tests.thorough import thorough, unless

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")

RAW = {"activity_label": "Running", "ctx_a": "He", "ctx_b": "now", "endings": ["runs", "flies"], "label": "0"}
PROCESSED = {"query": "Running: He Now", "choices": ["runs", "flies"], "label": "0"}
ARC = {"question": "Which?", "choices": {"text": ["this", "that"], "label": ["A", "B"]}, "answerKey": "B"}
GOOD = {
    "hellaswag": RAW,
    "piqa": {"goal": "Sit", "sol1": "Bend", "sol2": "Stand", "label": 1},
    "winogrande": {"sentence": "The _ ran", "option1": "cat", "option2": "hat", "answer": "1"},
    "lambada_openai": {"text": "the state runs on"},
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "openbookqa": {"question_stem": "Which", "choices": ARC["choices"], "answerKey": "A"},
    "boolq": {"passage": "Snow is white", "question": "is snow white", "label": 1},
}
ANSWERS = {"winogrande": "answer", "arc_easy": "answerKey", "arc_challenge": "answerKey", "openbookqa": "answerKey"}
GONE = type("Gone", (), {"__repr__": lambda _: "gone"})()


def load(folder, name, *documents):
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (loaded,) = load_tasks([name], folder, download=False)
    return loaded.task


def golds(task):
    return [task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row) for row in task.test_docs()]


@pytest.mark.parametrize("document", [RAW, PROCESSED], ids=["raw", "processed"])
def test_a_single_document_is_processed_at_most_once(document, tmp_path):
    (found,) = load(tmp_path, "hellaswag", document).test_docs()
    assert {key: found[key] for key in PROCESSED} == PROCESSED


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        *product(sorted({*PAPER} - {"lambada_openai"}), [GONE, "", -1, 7]),
        *(("piqa", wrong) for wrong in (None, "-1", "x", 0.5, [], float("nan"), [1])),
    ],
    ids=repr,
)
def test_answers_that_name_no_choice_are_refused(task, wrong, tmp_path):
    key = ANSWERS.get(task, "label")
    spoiled = {name: value for name, value in GOOD[task].items() if name != key}
    if wrong is not GONE:
        spoiled[key] = wrong
    with pytest.raises(EvaluationError, match=rf"{task}.jsonl, line 2: .*`{key}` is"):
        load(tmp_path, task, GOOD[task], spoiled)
    with pytest.raises(EvaluationError, match=rf"{task}.jsonl, line 1: .*`{key}` is"):
        load(tmp_path, task, spoiled, spoiled)


@pytest.mark.parametrize("task", PAPER)
def test_questions_that_are_no_strings_are_refused(task, tmp_path):
    text = next(iter(GOOD[task]))
    for wrong in ({text: None}, {text: 3}, {text: [""]}):
        with pytest.raises(EvaluationError, match=rf"{task}.jsonl, line 2: .*`{text}` is"):
            load(tmp_path, task, GOOD[task], GOOD[task] | wrong)
    with pytest.raises(EvaluationError, match=r"line 1: .*is missing"):
        load(tmp_path, task, {"id": 1}, GOOD[task])


@pytest.mark.parametrize(
    "task, wrong",
    [
        ("lambada_openai", {"text": "alone"}),
        ("lambada_openai", {"text": "the state runs on "}),
        ("winogrande", {"answer": 0}),
        ("piqa", {"label": True}),
        ("piqa", {"label": 2}),
        ("boolq", {"label": "yes"}),
        ("hellaswag", {"endings": "runs"}),
        ("hellaswag", {"endings": []}),
        ("hellaswag", {"endings": ["runs", None], "label": 0}),
        ("arc_easy", {"choices": {"text": ["this"], "label": ["A", "B"]}}),
        ("arc_easy", {"choices": {"text": ["this", "that"], "label": ["B", "B"]}}),
        ("arc_easy", {"choices": ["this", "that"]}),
        ("arc_easy", {"choices": {"text": ["this", "that"]}}),
    ],
)
def test_answers_out_of_the_choices_are_refused(task, wrong, tmp_path):
    with pytest.raises(EvaluationError, match=f"{task}.jsonl, line 2: does not fit the task {task}"):
        load(tmp_path, task, GOOD[task], GOOD[task] | wrong)


@pytest.mark.parametrize(
    "task, documents, expected",
    [
        ("piqa", [{"label": "1"}, {"label": 0}, {"label": 1.0}], [1, 0, 1]),
        ("boolq", [{"label": True}, {"label": "0"}], [1, 0]),
        ("hellaswag", [{"label": 1}, {"label": "0"}], [1, 0]),
        ("winogrande", [{"answer": 2}, {"answer": "1"}], [1, 0]),
        ("arc_easy", [{"answerKey": 2, "choices": {"text": ["a", "b"], "label": ["1", "2"]}}, {}], ["1", "1"]),
        ("openbookqa", [{"answerKey": " B"}, {"answerKey": "A"}], ["1", "0"]),
    ],
)
def test_answers_of_another_type_are_cast(task, documents, expected, tmp_path):
    found = load(tmp_path, task, *(GOOD[task] | document for document in documents))
    assert [str(gold) for gold in golds(found)] == [str(one) for one in expected]
    assert {type(gold) for gold in golds(found)} == {int}


@thorough
def test_answers_of_other_tasks_are_checked(tmp_path):
    good = {"premise": "It rains", "hypothesis": "It is wet", "label": 0}
    assert golds(load(tmp_path, "wnli", good | {"sentence1": "a", "sentence2": "b"})) == [0]
    for wrong in (-1, 2, None):
        with pytest.raises(EvaluationError, match=r"wnli.jsonl, line 2: .*its answer is"):
            load(tmp_path, "wnli", *({"sentence1": "a", "sentence2": "b", "label": label} for label in (1, wrong)))


def test_task_with_examples_refuses_a_file(tmp_path):
    """lm-eval would take the examples from the questions, and show a question with its own answer."""
    with pytest.raises(EvaluationError, match=r"jcommonsenseqa shows 3 answered examples .* --download without --data"):
        load(tmp_path, "ja_leaderboard_jcommonsenseqa", {"question": "a"})


def test_fields_of_several_types_are_named(tmp_path):
    with pytest.raises(EvaluationError, match=r'piqa.jsonl, line 2: `id` is "b", a string, and a number'):
        load(tmp_path, "piqa", GOOD["piqa"] | {"id": 1}, GOOD["piqa"] | {"id": "b"})


def test_wrong_lines_and_records_are_counted_from_one(tmp_path):
    (tmp_path / "piqa.jsonl").write_text(f"{json.dumps(GOOD['piqa'])}\n\n[1]\n")
    with pytest.raises(EvaluationError, match=r"piqa\.jsonl, line 3: not a JSON object"):
        load_tasks(["piqa"], tmp_path, download=False)
    (tmp_path / "piqa.jsonl").unlink()
    rows = [GOOD["piqa"], GOOD["piqa"] | {"label": 7}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "piqa.parquet")
    with pytest.raises(EvaluationError, match=r"piqa\.parquet, record 2: .*`label` is 7, not a number from 0 to 1"):
        load_tasks(["piqa"], tmp_path, download=False)


@pytest.mark.parametrize("name", unless(["piqa"], ["hellaswag", "piqa"]))
def test_downloads_are_kept_for_machines_offline(name, tmp_path, monkeypatch):
    import datasets

    splits = {split: datasets.Dataset.from_list([GOOD[name], GOOD[name]]) for split in ("train", "validation")}
    monkeypatch.setattr(tasks, "_refuse_without_network", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict(splits))
    (first,) = load_tasks([name], tmp_path / "new", download=True)
    monkeypatch.delattr(datasets, "load_dataset")
    (again,) = load_tasks([name], tmp_path / "new", download=False)
    assert first.file == again.file == tmp_path / "new" / f"{name}.jsonl.gz" and first.sha256 == again.sha256
    assert [*first.task.eval_docs] == [*again.task.eval_docs] and len(again.task.eval_docs) == 2
    command = ["evaluate", "--data", str(tmp_path / "new"), "--download", "--tasks", name]  # no model, nothing missing
    assert CliRunner().invoke(app, command).stdout == f"{first.file}: 2 questions\n"


def test_without_a_model_only_downloads_are_possible():
    assert CliRunner().invoke(app, ["evaluate", "--data", "evaldata"]).exit_code == 2


def test_failed_download_names_the_task_in_one_line(monkeypatch):
    manager = pytest.importorskip(
        "lm_eval.tasks", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]"
    )
    monkeypatch.setattr(manager.TaskManager, "__init__", lambda self: None)  # it lists all tasks, which takes seconds
    monkeypatch.setattr(manager.TaskManager, "load", raise_no_network)
    with pytest.raises(EvaluationError, match=r"^piqa: its data could not be downloaded: ConnectionError: no network$"):
        tasks._downloaded("piqa")


@pytest.mark.parametrize("offline", [False, True])
def test_download_without_network_fails_before_retries(tmp_path, monkeypatch, offline):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(tasks, "_downloaded", lambda name: raise_no_network(None, [name]))
    refused, why = (ConnectionError, "no network") if offline else (EvaluationError, "127.0.0.1:9 does not answer")
    with pytest.raises(refused, match=why):
        load_tasks(["piqa"], tmp_path, download=True)


def raise_no_network(manager, names):
    raise ConnectionError("no network\nin detail")
