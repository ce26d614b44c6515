"""`blackmamba evaluate`: results beside the run, nothing repeated, killed evaluations resumed, one line an error."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from megatron_blackmamba import cli
from megatron_blackmamba.evaluation import EvaluationError, evaluate, tasks, watch
from megatron_blackmamba.evaluation.evaluate import Options
from megatron_blackmamba.evaluation.evaluate import evaluate as run_evaluation
from megatron_blackmamba.evaluation.tasks import names_of
from megatron_blackmamba.formats.evaluations import claim, is_claimed, read_evaluation
from megatron_blackmamba.formats.run_folder import RunFolder
from megatron_blackmamba.interchange.canonical import InterchangeError
from tests.thorough import thorough

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install megatron-blackmamba[eval]")
TASKS = ("piqa", "lambada_openai")


def options(data, **more):
    return Options(TASKS, data=data, device="cpu", **more)


def command(*words):
    return [sys.executable, "-m", "megatron_blackmamba", "evaluate", *map(str, words)]


def test_a_run_is_scored_beside_its_checkpoint(run, data):
    found = run_evaluation(run, options(data))
    stored = read_evaluation(RunFolder(run).evaluation(2))
    assert stored == found
    assert {result.key.task for result in stored.results} == set(TASKS)
    piqa, lambada = stored.results
    assert len(piqa.key.data) == 64
    assert piqa.metrics["acc"] == sum(piqa.answers["acc"]) / 12
    assert 0 < piqa.errors["acc"] < 0.2
    assert lambada.errors["perplexity"] > 0
    assert list(RunFolder(run).evaluations.iterdir()) == [RunFolder(run).evaluation(2)]


def test_finished_tasks_are_not_repeated(run, data, monkeypatch):
    first = run_evaluation(run, Options(("piqa",), data=data, device="cpu"))
    begun = []
    scored = evaluate._score
    monkeypatch.setattr(evaluate, "_score", lambda task, *rest: begun.append(task.name) or scored(task, *rest))
    both = run_evaluation(run, options(data))
    assert begun == ["lambada_openai"]
    assert both.results[0] == first.results[0]
    run_evaluation(run, options(data, limit=5))
    assert begun == ["lambada_openai", *TASKS]


def test_changed_data_is_scored_again(run, data, tmp_path):
    mine = shutil.copytree(data, tmp_path / "mine")
    old = run_evaluation(run, Options(("piqa",), data=mine, device="cpu"))
    lines = (mine / "piqa.jsonl").read_text().splitlines()
    (mine / "piqa.jsonl").write_text("\n".join(lines[:6]))
    new = run_evaluation(run, Options(("piqa",), data=mine, device="cpu"))
    assert (old.results[0].questions, new.results[0].questions) == (12, 6)
    assert len(read_evaluation(RunFolder(run).evaluation(2)).results) == 2


@thorough
def test_several_processes_give_the_same_scores(export, data, tmp_path):
    one = run_evaluation(export("MEME"), options(data, out=tmp_path / "one.json"))
    two = run_evaluation(export("MEME"), options(data, out=tmp_path / "two.json", nproc=2, batch_tokens=64))
    for a, b in zip(one.results, two.results, strict=True):
        assert dict(a.metrics) == pytest.approx(dict(b.metrics), rel=1e-5)


KILLS_ITSELF = """
import os, signal
from megatron_blackmamba import cli
from megatron_blackmamba.evaluation.journal import Journal
done = Journal.done
def done_and_die(self, batch, scores):
    done(self, batch, scores)
    if "lambada" in self.path.name and self.path.read_text().count("\\n") > 2:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.done = done_and_die
cli.main()
"""


def test_a_killed_evaluation_goes_on_where_it_was(export, data, tmp_path):
    words = (export("MEME"), "--tasks", ",".join(TASKS), "--data", data, "--device", "cpu", "--batch-tokens", 20)
    whole = run_evaluation(export("MEME"), options(data, batch_tokens=20, out=tmp_path / "whole.json"))
    out = tmp_path / "killed.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killed = [sys.executable, "-c", KILLS_ITSELF, *command(*words, "--out", out)[3:]]
    assert subprocess.run(killed, **quiet).returncode == -signal.SIGKILL
    partial = tmp_path / ".killed.lambada_openai.partial"
    assert partial.exists()
    noted = partial.read_text().splitlines()
    partial.write_text("\n".join([*noted[:-1], noted[-1][:-3]]))  # the last line was cut short
    finished = read_evaluation(out)
    assert [result.key.task for result in finished.results] == ["piqa"]
    run_evaluation(export("MEME"), options(data, batch_tokens=20, out=out))
    for a, b in zip(whole.results, read_evaluation(out).results, strict=True):
        assert a.key == b.key
        assert dict(a.metrics) == pytest.approx(dict(b.metrics), rel=1e-5)  # the processes may differ in threads
        assert a.answers.keys() == b.answers.keys()
        for name, values in a.answers.items():
            assert values == pytest.approx(b.answers[name], rel=1e-5), name
    assert read_evaluation(out).results[0].seconds == finished.results[0].seconds
    assert not partial.exists()


def test_watch_scores_every_kept_checkpoint_until_the_end(run, data, capsys):
    RunFolder(run).done.touch()
    watch.watch(run, options(data))
    found = [read_evaluation(RunFolder(run).evaluation(step)) for step in (1, 2)]
    assert found[0].results[0].metrics != found[1].results[0].metrics or found[0].results[1] != found[1].results[1]
    assert "step 2" in capsys.readouterr().out


def test_watch_goes_on_after_a_damaged_checkpoint(run, data, capsys):
    RunFolder(run).done.touch()
    next((run / "checkpoints" / "step_00000001").glob("*.distcp")).write_bytes(b"x")
    with pytest.raises(EvaluationError, match=r"1 of 2 checkpoints of .* were not scored: 1. See"):
        watch.watch(run, options(data))
    assert "step 1: " in capsys.readouterr().err
    assert len(read_evaluation(RunFolder(run).evaluation(2)).results) == 2


def test_claim_is_aged_by_clock_of_file_system(run, monkeypatch):
    with claim(run, 1):
        monkeypatch.setattr(time, "time", lambda later=time.time() + 7200: later)
        assert is_claimed(run, 1)


def test_claim_ends_with_its_process_or_expires(run):
    with claim(run, 1):
        assert is_claimed(run, 1)
        (marker,) = RunFolder(run).evaluations.glob("step_00000001.claim-*")
        os.utime(marker, (time.time() - 7200, time.time() - 7200))
        assert not is_claimed(run, 1)
    assert not marker.exists()
    with claim(run, 1):
        with claim(run, 1):
            pass
        assert is_claimed(run, 1)  # by the reader that is left
        next(RunFolder(run).evaluations.glob("*.claim-*")).unlink()  # by hand


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda folder: (folder / "piqa.jsonl").write_text('{"goal": '), "piqa.jsonl, line 1: not JSON"),
        (lambda folder: (folder / "piqa.jsonl").write_text('{"goal": "x"}'), "does not fit the task piqa"),
        (lambda folder: (folder / "piqa.jsonl").unlink(), "has no file for piqa"),
        (lambda folder: (folder / "piqa.jsonl").write_text(""), "has no document"),
    ],
    ids=["damaged", "other fields", "missing", "empty"],
)
def test_unusable_data_is_one_line_and_keeps_results(run, data, tmp_path, spoil, said):
    mine = shutil.copytree(data, tmp_path / "mine")
    run_evaluation(run, Options(("lambada_openai",), data=mine, device="cpu"))
    spoil(mine)
    with pytest.raises(EvaluationError, match=said) as error:
        run_evaluation(run, options(mine))
    assert "\n" not in str(error.value)
    assert len(read_evaluation(RunFolder(run).evaluation(2)).results) == 1


def test_document_that_does_not_fit_is_named(run, data, tmp_path):
    mine = shutil.copytree(data, tmp_path / "mine")
    with open(mine / "winogrande.jsonl", "a") as file:
        file.write("\n" + json.dumps({"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}))
    with pytest.raises(EvaluationError, match=r"winogrande.jsonl, line 13: does not fit the task winogrande"):
        run_evaluation(run, Options(("piqa", "winogrande"), data=mine, device="cpu"))
    assert not RunFolder(run).evaluation(2).exists()


def test_labels_written_as_strings_score_alike(run, data, tmp_path):
    numbers = run_evaluation(run, Options(("piqa",), data=data, device="cpu"))
    mine = tmp_path / "mine"
    mine.mkdir()
    rows = [json.loads(line) for line in (data / "piqa.jsonl").read_text().splitlines()]
    rows = [row | {"label": (str, int, float)[i % 3](row["label"])} for i, row in enumerate(rows)]
    (mine / "piqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    strings = run_evaluation(run, Options(("piqa",), data=mine, device="cpu"))
    assert strings.results[0].answers == numbers.results[0].answers


def test_wrong_names_and_models_are_one_line(run, export, data, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "_index", lambda: tasks._near("piqa"))  # all of lm-eval's take seconds
    with pytest.raises(EvaluationError, match=r"no task 'piqaa'\. Did you mean piqa"):
        run_evaluation(run, Options(("piqaa",), data=data))
    with pytest.raises(InterchangeError, match=r"nope: no such folder.*Name a run"):
        run_evaluation(tmp_path / "nope", Options(("piqa",)))
    with pytest.raises(EvaluationError, match="no --data DIR given for piqa"):
        run_evaluation(run, Options(("piqa",)))
    bare = shutil.copytree(export("MEME"), tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(EvaluationError, match="has no tokenizer"):
        run_evaluation(bare, options(data))
    shard = next((run / "checkpoints" / "step_00000002").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="its content changed"):
        run_evaluation(run, options(data))


def test_scores_belong_to_weights_and_tokenizer(export, tokenizer, tmp_path):
    other = shutil.copy(tokenizer, tmp_path / "other.json")
    with open(other, "a") as file:
        file.write("\n")
    models, texts = (export("MEME"), export("ME*-ME")), (None, tokenizer, other)
    assert len({evaluate.identify(model, text) for model in models for text in texts}) == 6


def test_paper_stands_for_eight_tasks():
    assert len(names_of("paper")) == 8
    assert names_of("piqa, paper")[0] == "piqa"
    with pytest.raises(EvaluationError, match="empty"):
        names_of(" ,")


def test_the_command_prints_one_json_object(run, data, capsys):
    words = ["evaluate", str(run), "--tasks", "piqa", "--data", str(data), "--limit", "4", "--json"]
    cli.app(words, standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"]["piqa"]["questions"] == 4
    assert found["tasks"]["piqa"]["data"]["file"].endswith("piqa.jsonl")
