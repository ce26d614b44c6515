"""Sinkhorn's bias found from text: inference of the released weights then chooses nearly as training did."""

import json
import re

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from megatron_blackmamba.cli import app
from megatron_blackmamba.evaluation import keep_bias
from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.inference import Decoder, load
from megatron_blackmamba.inference.weights import pack
from megatron_blackmamba.interchange import zyphra
from megatron_blackmamba.interchange.canonical import in_memory
from megatron_blackmamba.interchange.open import open_model
from megatron_blackmamba.ops.sinkhorn import load_imbalance, sinkhorn_choice
from tests.evaluation.conftest import random_model, sentence


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "some.jsonl"
    file.write_text("".join(json.dumps({"text": sentence(i, 40)}) + "\n" for i in range(60)))
    return file


def with_liked_experts(tokenizer):
    """A model whose routers like some experts more than others, as trained ones do."""
    model = random_model("MEME", tokenizer)
    weights = {name: entry.load().clone() for name, entry in model.entries.items()}
    for name in weights:
        if name.endswith("router.bias"):
            weights[name] = torch.linspace(-1, 1, 4)
        if name.endswith("router.weight"):
            weights[name] /= 4  # one iteration balances logits of a moderate size
    return in_memory(model.config, weights, tokenizer=tokenizer, sequence_length=64)


def choices(model, windows_BL, monkeypatch):
    """Return logits and choice of each layer of experts."""
    seen = []
    choose = keep_bias.ExpertsDecoding.choose

    def watched(self, kind, logits_TE, at):
        seen.append((logits_TE.clone(), choose(self, kind, logits_TE, at)))
        return seen[-1][1]

    with monkeypatch.context() as patch:
        patch.setattr(keep_bias.ExpertsDecoding, "choose", watched)
        decoder = Decoder(pack(model, torch.float32))
        decoder.read_all(decoder.start(len(windows_BL)), windows_BL)
    return seen


def test_kept_bias_balances_inference_as_training(tokenizer, text, monkeypatch):
    model = with_liked_experts(tokenizer)
    found, gain = keep_bias.kept(model, [text], 100_000, "cpu")
    assert (found.config.router.kind, model.config.router.kind) == ("sinkhorn_bias", "sinkhorn")
    _, second_BL = keep_bias._halves(model, [text], 100_000)
    for (_, plain), (_, kept) in zip(
        choices(model, second_BL, monkeypatch), choices(found, second_BL, monkeypatch), strict=True
    ):
        assert load_imbalance(kept, 4) < 0.75 * load_imbalance(plain, 4)
    logits_TE, kept = choices(found, second_BL, monkeypatch)[0]  # of the first layer, whose inputs are the same
    balanced = sinkhorn_choice(logits_TE).view(-1, 1)
    assert (kept == balanced).float().mean() > 0.9 > (logits_TE.argmax(1, True) == balanced).float().mean()
    assert len(gain.before) == len(gain.after) == len(second_BL) and gain.before != gain.after


def test_command_keeps_the_bias_of_released_files(tokenizer, text, tmp_path):
    """What it prints is the loss of the folders before and after, as the decoder computes it."""
    zyphra.write(with_liked_experts(tokenizer), tmp_path / "released")
    words = [tmp_path / "released", tmp_path / "kept", "--to", "hf", "--text", text, "--tokenizer", tokenizer]
    done = CliRunner().invoke(app, ["keep-bias", *map(str, words), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    said = re.search(r"nats per token: ([\d.]+) with the largest logit, ([\d.]+) with the kept bias", done.output)
    source = open_model(tmp_path / "released", tokenizer)
    _, second_BL = keep_bias._halves(source, [text], 1_000_000)
    for number, folder in zip(said.groups(), ("released", "kept"), strict=True):
        decoder = load(tmp_path / folder, device="cpu", tokenizer=tokenizer).decoder
        logits_BLV = decoder.read_all(decoder.start(len(second_BL)), second_BL[:, :-1])
        loss = cross_entropy(logits_BLV.flatten(0, 1), second_BL[:, 1:].flatten())
        assert float(number) == pytest.approx(loss.item(), abs=1e-3)
    kept = open_model(tmp_path / "kept")
    assert kept.config.router.kind == "sinkhorn_bias"
    biases = [entry.load() for name, entry in kept.entries.items() if name.endswith("expert_bias")]
    assert len(biases) == 2 and all(bias_E.std() > 0.1 for bias_E in biases)
    assert "compared with the source" in done.output


def test_what_has_no_such_bias_is_refused(tokenizer, text, tmp_path):
    softmax = random_model("ME", tokenizer, router={"kind": "softmax"})
    with pytest.raises(EvaluationError, match=r"model\.router\.kind=softmax: only sinkhorn"):
        keep_bias.kept(softmax, [text], 1000, "cpu")
    with pytest.raises(EvaluationError, match="tokens of text are too few: give 520 at least"):
        keep_bias.kept(random_model("ME", tokenizer), [text], 300, "cpu")
    with pytest.raises(EvaluationError, match="has no tokenizer"):
        keep_bias.kept(random_model("ME", None), [text], 1000, "cpu")
