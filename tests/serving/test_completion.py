"""What an answer tells of tokens."""

import torch

from megatron_blackmamba.inference import Sampling
from megatron_blackmamba.serving.completion import Completion
from megatron_blackmamba.serving.job import Job, Written, told_tokens
from megatron_blackmamba.tokenizer import load_tokenizer
from tests.tokenizer.test_tokenizer import saved, trained


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
