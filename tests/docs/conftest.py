"""What `blackmamba quickstart` leaves behind."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def quickstart(session, tmp_path_factory):
    """Return a folder with the quickstart in small: text, shards, a mixture and a run of two steps, in its folders."""
    folder = tmp_path_factory.mktemp("quickstart")
    corpus = folder / "runs/quickstart/corpus/code"
    corpus.mkdir(parents=True)
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("[a-z]*.py"))]
    for part, some in (("train", texts), ("held_out", [Path(__file__).read_text()])):
        (corpus / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    done = session.run(
        "cd runs/quickstart\n"
        "blackmamba data tokenize corpus/code/train.jsonl tokens/code/train --train-tokenizer 1024\n"
        "cp tokens/code/train/tokenizer.json tokens\n"
        "echo 'sources: [{name: code, shards: tokens/code/train}]' > mixture.yaml\n"
        "blackmamba train quickstart data.mixture=$PWD/mixture.yaml folder=$PWD training.steps=2\n",
        folder,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return folder


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """Return a folder with two questions for each of the paper's eight tasks, in the form of lm-eval's data sets."""
    folder = tmp_path_factory.mktemp("questions")
    four = {"text": ["a list", "a dict", "a number", "a string"], "label": ["A", "B", "C", "D"]}
    arc = {"question": "What does json.loads return?", "choices": four, "answerKey": "B"}
    rows = {
        "hellaswag": {
            "ind": 1,
            "activity_label": "Code",
            "ctx_a": "A function reads",
            "ctx_b": "text",
            "label": "0",
            "endings": ["and returns an object.", "and sings.", "and runs away.", "or not."],
        },
        "piqa": {"goal": "Read a file", "sol1": "open it", "sol2": "close it", "label": 0},
        "winogrande": {"sentence": "The list holds _ of numbers.", "option1": "pairs", "option2": "a", "answer": "1"},
        "lambada_openai": {"text": "The function returns the value, and the caller prints the value"},
        "arc_easy": arc,
        "arc_challenge": arc,
        "openbookqa": {"question_stem": arc["question"], "choices": four, "answerKey": "B"},
        "boolq": {"question": "is json text", "passage": "JSON is a text format.", "label": 1},
    }
    for task, row in rows.items():
        (folder / f"{task}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return folder
