"""Bits per byte of local text: as transformers and plain Python compute them, over every token once, and resumable."""

import gzip
import json
import math
import statistics

import pytest
import tokenizers
import torch

from megatron_blackmamba import cli
from megatron_blackmamba.evaluation import EvaluationError
from megatron_blackmamba.evaluation.evaluate import Options, evaluate
from megatron_blackmamba.evaluation.model import ScoredModel
from megatron_blackmamba.evaluation.texts import windows
from tests.evaluation.conftest import sentence

CONTEXT = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Documents shorter and longer than a window, in two formats."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "some.jsonl").write_text("".join(json.dumps({"text": sentence(i, 1 + 5 * i)}) + "\n" for i in range(6)))
    (folder / "one.txt.gz").write_bytes(gzip.compress(sentence(3, 40).encode()))
    return folder / "some.jsonl", folder / "one.txt.gz"


def options(files, **more):
    return Options(text=tuple(map(str, files)), context=CONTEXT, device="cpu", dtype=torch.float32, **more)


def in_transformers(folder, texts):
    """Sum the nats of the documents token by token, each window in a pass of its own; return them, tokens and bytes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    nats = tokens = 0
    for text in texts:
        ids = [0, *tokenizer.encode(text, add_special_tokens=False).ids, 0]  # 0 ends documents
        tokens += len(ids) - 1
        for at in range(1, len(ids)):
            window = 0 if at <= CONTEXT else 1 + (at - CONTEXT - 1) // (CONTEXT // 2)
            end = min(len(ids), 1 + CONTEXT + window * CONTEXT // 2)  # the last token that this window scores, and one
            with torch.no_grad():
                logits_V = model(torch.tensor([ids[max(0, end - 1 - CONTEXT) : at]])).logits[0, -1].double()
            nats -= logits_V.log_softmax(-1)[ids[at]].item()
    return nats, tokens, sum(len(text.encode()) for text in texts)


def test_bits_per_byte_equal_those_of_transformers(export, files, tmp_path):
    folder = export("ME*-ME")
    found = evaluate(folder, options(files, out=tmp_path / "scores.json"))
    texts = [[json.loads(line)["text"] for line in files[0].open()], [gzip.decompress(files[1].read_bytes()).decode()]]
    for result, name, documents in zip(found.results, ("some.jsonl", "one.txt.gz"), texts, strict=True):
        nats, tokens, size = in_transformers(folder, documents)
        assert result.key.task == f"text:{name}" and result.questions == len(documents)
        assert result.counts == {"tokens": tokens, "bytes": size}
        assert result.metrics["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
        assert result.metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
        of_documents = result.answers["bits_per_byte"]
        assert sum(of_documents) / len(documents) == pytest.approx(result.metrics["bits_per_byte"])


def test_errors_are_those_of_ratios_over_documents(export, files, tmp_path):
    folder = export("ME*-ME")
    (result, single) = evaluate(folder, options(files, out=tmp_path / "scores.json")).results
    assert single.errors == {}
    texts = [json.loads(line)["text"] for line in files[0].open()]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = {
        "bits_per_byte": [len(text.encode()) for text in texts],
        "nats_per_token": [len(tokenizer.encode(text, add_special_tokens=False).ids) + 1 for text in texts],
    }
    bits = [each * result.counts["bytes"] / len(texts) for each in result.answers["bits_per_byte"]]
    for name, whole, unit in (("bits_per_byte", bits, 1), ("nats_per_token", bits, math.log(2))):
        ratio = sum(whole) / sum(sizes[name])
        residuals = [one - ratio * size for one, size in zip(whole, sizes[name], strict=True)]
        expected = unit * math.sqrt(len(texts)) * statistics.stdev(residuals) / sum(sizes[name])
        assert result.errors[name] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 24, 25, 100])
@pytest.mark.parametrize("context", [1, 2, 7, 16])
def test_every_token_is_scored_once_with_enough_context(length, context):
    tokens, scored = list(range(length)), []
    for before, after in windows(tokens, context):
        assert [*before, *after] == tokens[after[-1] - len(before) - len(after) + 1 : after[-1] + 1]
        assert len(before) + len(after) <= context + 1
        assert len(before) > context - context // 2 - 1 or before[0] == 0
        scored += after
    assert scored == tokens[1:]


def test_finished_texts_and_halves_are_not_read_again(export, files, tmp_path, monkeypatch):
    out, read = tmp_path / "scores.json", []
    model = export("MEME")
    plain = ScoredModel.scores

    class Killed(Exception):
        pass

    def killed(self, *given):
        done = self.watcher.done

        def die(batch, scores):
            done(batch, scores)
            raise Killed

        self.watcher.done = die
        return plain(self, *given)

    monkeypatch.setattr(ScoredModel, "scores", killed)
    with pytest.raises(Killed):
        evaluate(model, options(files[:1], out=out, batch_tokens=32))
    monkeypatch.setattr(ScoredModel, "scores", plain)
    resumed = evaluate(model, options(files[:1], out=out, batch_tokens=32), lambda name, done, all: read.append(done))
    assert read[0] > 0  # what the killed call had scored
    monkeypatch.setattr(ScoredModel, "scores", killed)
    assert evaluate(model, options(files[:1], out=out)) == resumed
    monkeypatch.setattr(ScoredModel, "scores", plain)
    assert evaluate(model, options(files[:1], out=tmp_path / "whole.json")).results[0].metrics == pytest.approx(
        resumed.results[0].metrics
    )
    assert not list(tmp_path.glob(".*.partial"))


def test_damaged_and_missing_text_is_one_line(export, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": 3}\n')
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for file, words in ((bad, "record 2"), (empty, "has no document"), (tmp_path / "none.txt", "no such file")):
        with pytest.raises(EvaluationError, match=words) as error:
            evaluate(export("MEME"), options([file], out=tmp_path / "scores.json"))
        assert "\n" not in str(error.value) and str(file) in str(error.value)
    with pytest.raises(EvaluationError, match="nothing to score"):
        evaluate(export("MEME"), Options(device="cpu"))


def test_command_adds_up_the_files_of_a_glob(export, files, tmp_path, capsys):
    words = ["evaluate", str(export("MEME")), "--context=16", f"--out={tmp_path / 's.json'}", "--json", "--device=cpu"]
    cli.app([*words, "--text", *map(str, files)], standalone_mode=False)
    said = json.loads(capsys.readouterr().out)
    texts = said["tasks"].values()
    bits = sum(text["metrics"]["bits_per_byte"] * text["bytes"] for text in texts)
    assert said["all_texts"]["bits_per_byte"] == pytest.approx(bits / sum(text["bytes"] for text in texts))
