"""What an answer tells of tokens."""

import pytest
import torch
from pydantic import ValidationError

from megatron_blackmamba.inference import Sampling
from megatron_blackmamba.serving.completion import Completion, CompletionRequest
from megatron_blackmamba.serving.job import Job, Written, rows_of, told_tokens
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.tokenizer.test_tokenizer import metaspace, saved, trained


def pieces_of(tokenizer, tokens, prompt, **options):
    """Return what a row emits of some tokens."""
    pieces = []
    job = Job([prompt], Sampling(), len(tokens), pieces.append, **options)
    (row,) = rows_of(job, tokenizer, tokenizer.vocab_size, torch.device("cpu"))
    for token in tokens:
        row.advance(token, torch.zeros(tokenizer.vocab_size), tokenizer)
    return pieces


@pytest.mark.parametrize("items", [[1, *["a"] * 999], [[1], *[[2.5]] * 999], [[1], [*[None] * 999]]])
@pytest.mark.parametrize("option", ["prompt", "stop"])
def test_a_list_is_checked_until_an_error(option, items):
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": "a", option: items})
    assert refused.value.error_count() < 9


@pytest.mark.parametrize("logprobs", [None, 0])
def test_usage_counts_tokens_that_gave_no_text(tmp_path, logprobs):
    tokenizer = load_tokenizer(saved(tmp_path, trained()), backend="tokenizers")
    tokens = [*tokenizer.encode("🐍 ok"), tokenizer.eod_id]
    pieces = pieces_of(tokenizer, tokens, [1], logprobs=logprobs, stop=["okay"])
    assert sum(piece.written for piece in pieces) == len(tokens) > len("🐍 ok")


@pytest.mark.parametrize("prompt", [["▁Hello"], ["</s>"]])
def test_probabilities_spell_the_spaces_of_the_text(tmp_path, prompt):
    tokenizer = load_tokenizer(saved(tmp_path, metaspace()), backend="tokenizers")
    ids = tokenizer._reference.token_to_id
    pieces = pieces_of(tokenizer, [ids("▁world"), ids("▁again")], [*map(ids, prompt)], logprobs=3)
    text = "".join(piece.text for piece in pieces)
    assert text == ("world again" if prompt == ["</s>"] else " world again")
    assert "".join(token.text for piece in pieces for token in piece.tokens) == text


def test_parts_of_characters_are_told_apart(tmp_path):
    tokenizer = load_tokenizer(saved(tmp_path, trained()), backend="tokenizers")
    text = "née 🐍 ok"
    tokens = tokenizer.encode(text)
    logits_LV = torch.randn(len(tokens), tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    job = Job([tokens], Sampling(), 1, print, logprobs=20)
    answer = Completion(job, "tiny", 0, False, False).whole(
        [Written(0, text, told_tokens(logits_LV, tokens, 20, tokenizer))]
    )
    told = answer["choices"][0]["logprobs"]
    assert r"bytes:\x8d" in told["tokens"]
    best = logits_LV.log_softmax(dim=-1).topk(20).values.tolist()
    assert [list(top.values()) for top in told["top_logprobs"]] == best
    for place, part in zip(told["text_offset"], told["tokens"], strict=True):
        assert part.startswith("bytes:") or text[place : place + len(part)] == part
