"""Loss by position and retrieval: the numbers of one plain pass, the same after a kill, and facts where they belong."""

import json
import random

import pytest
import tokenizers
import torch

from megatron_blackmamba.evaluation import EvaluationError, length, retrieval, scoring
from megatron_blackmamba.evaluation.evaluate import Options, evaluate
from megatron_blackmamba.evaluation.length import buckets, in_windows
from megatron_blackmamba.evaluation.model import ScoredModel
from megatron_blackmamba.evaluation.tasks import LENGTH, names_of
from megatron_blackmamba.evaluation.texts import windows
from megatron_blackmamba.inference import Decoder
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.evaluation.conftest import random_model, sentence
from tests.tokenizer.test_tokenizer import saved, trained

LONG = 160


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Documents that are all shorter than 160 tokens."""
    file = tmp_path_factory.mktemp("texts") / "some.jsonl"
    file.write_text("".join(json.dumps({"text": sentence(i, 20)}) + "\n" for i in range(6)))
    return file


def options(text=(), tasks=LENGTH, **more):
    return Options(tasks, text=text, length=LONG, device="cpu", dtype=torch.float32, **more)


def one_pass(decoder, tokens):
    logits_LV = decoder.read_all(decoder.start(1), torch.tensor([tokens[:-1]]))[0].double()
    return -logits_LV.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("more", [{}, {"eod_reset": 9}], ids=["plain", "resetting"])
def test_pieces_and_windows_have_nats_of_whole_passes(monkeypatch, more):
    monkeypatch.setattr(scoring, "PIECE", 7)
    monkeypatch.setattr(scoring, "HEAD_ROWS", 5)
    decoder = Decoder(pack(random_model("M*E-", None, **more), torch.float32))
    tokens = random.Random(1).choices(range(64), k=60)
    found_L = scoring.token_nats(decoder, torch.tensor([tokens, tokens[::-1]]))[0]
    torch.testing.assert_close(found_L, one_pass(decoder, tokens), atol=1e-4, rtol=1e-4)
    expected = [one_pass(decoder, [*before, *after])[-len(after) :] for before, after in windows(tokens, 12)]
    torch.testing.assert_close(in_windows(decoder, tokens, 12, 30), torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(in_windows(decoder, tokens, 99, 30), found_L, atol=1e-4, rtol=1e-4)


def test_loss_by_position_equals_that_of_transformers(export, text, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = export("ME*-ME")
    (result,) = evaluate(folder, options((str(text),), ("length:loss",), out=tmp_path / "s.json", limit=2)).results
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = [0]
    for line in text.open():
        stream += [*tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    sequences = torch.tensor([stream[: LONG + 1], stream[LONG : 2 * LONG + 1]])
    with torch.no_grad():
        logits_BLV = model(sequences[:, :-1]).logits.double()
    nats_BL = -logits_BLV.log_softmax(-1).gather(2, sequences[:, 1:, None])[..., 0]
    assert result.questions == 2 and result.counts["joined"] == 1
    assert [(row["from"], row["to"]) for row in result.rows] == [(0, 64), (64, 128), (128, 160)] == buckets(LONG)
    for row in result.rows:
        some = slice(row["from"], row["to"])
        assert row["bytes"] == (sequences[:, 1:][:, some] != 0).sum()  # each letter is a token of its own
        assert row["nats_per_token"] == pytest.approx(nats_BL[:, some].mean().item(), rel=1e-4)
        bits = nats_BL[:, some].sum().item() / torch.tensor(2.0).log().item()
        assert row["bits_per_byte"] == pytest.approx(bits / row["bytes"], rel=1e-4)
    assert result.rows[0]["window_bits_per_byte"] == pytest.approx(result.rows[0]["bits_per_byte"])  # trained on 64


def test_killed_measurement_goes_on_with_the_next_sequence(export, text, tmp_path, monkeypatch):
    whole = evaluate(export("MEME"), options((str(text),), ("length:loss",), out=tmp_path / "whole.json"))
    measured, plain = [], length._of_sequence

    def once(tokens, *given):
        if measured:
            raise KeyboardInterrupt
        measured.append(tokens)
        return plain(tokens, *given)

    monkeypatch.setattr(length, "_of_sequence", once)
    with pytest.raises(KeyboardInterrupt):
        evaluate(export("MEME"), options((str(text),), ("length:loss",), out=tmp_path / "killed.json"))
    again = []
    monkeypatch.setattr(length, "_of_sequence", lambda tokens, *given: again.append(tokens) or plain(tokens, *given))
    resumed = evaluate(export("MEME"), options((str(text),), ("length:loss",), out=tmp_path / "killed.json"))
    assert measured[0] not in again and len(again) == whole.results[0].questions - 1
    assert resumed.results[0].rows == whole.results[0].rows


@pytest.mark.parametrize("kind", ["passkey", "recall"])
def test_question_differs_from_the_other_in_its_fact(tmp_path, kind):
    text = load_tokenizer(saved(tmp_path, trained()))
    for depth in retrieval.DEPTHS:
        made = [retrieval.QUESTION[kind](random.Random("a"), text, 400, depth) for _ in range(2)]
        assert made[0] == made[1]  # by seed
        (right, answer), (other, same) = made[0]
        assert same == answer and len(right) <= 400
        inside = text.decode(right[1:])
        told = text.decode(answer).strip()
        assert told in inside and told not in text.decode(other[1:])
        assert inside.index(told) / len(inside) == pytest.approx(depth, abs=0.35)
        short = min(len(right), len(other))
        differing = [i for i in range(short) if right[i] != other[i]]
        assert len(right) == len(other) and differing[-1] - differing[0] < 60


def test_only_a_reader_of_the_context_gains(export, tmp_path, monkeypatch):
    """One finds an answer that its context has; the other remembers 100 tokens."""

    def scores(self, pairs, longest=None, reach=None):
        found = []
        for context, answer in pairs:
            seen = self.text.decode(context[-reach:] if reach else context)
            known = self.text.decode(answer).strip() in seen
            found.append((-1.0 if known else -5.0, known))
        return found

    tasks = ("length:recall",)  # the tokenizer of these models has no digits for a passkey
    monkeypatch.setattr(ScoredModel, "scores", scores)
    good = evaluate(export("MEME"), options((), tasks, out=tmp_path / "good.json"))
    monkeypatch.setattr(ScoredModel, "scores", lambda *given: scores(*given, reach=100))
    bad = evaluate(export("MEME"), options((), tasks, out=tmp_path / "bad.json"))
    for of_good, of_bad in zip(good.results, bad.results, strict=True):
        assert of_good.metrics["accuracy"] == 1
        assert of_good.metrics["gain_bits"] > 4  # 5.8 where the value is in no other word
        assert of_bad.metrics["gain_bits"] < of_good.metrics["gain_bits"]
        by_cell = {(row["length"], row["depth"]): row["accuracy"] for row in of_bad.rows}
        assert by_cell[160, 0.0] < by_cell[160, 1.0]


def test_missing_or_short_text_is_one_line(export, text, tmp_path):
    with pytest.raises(EvaluationError, match=r"needs text\. Name files with --text FILE"):
        evaluate(export("MEME"), options())
    with pytest.raises(EvaluationError, match=r"the text has .* tokens, and --length is 99,999"):
        evaluate(export("MEME"), Options(("length:loss",), text=(str(text),), length=99_999, out=tmp_path / "s.json"))
    assert names_of("length") == list(LENGTH)
