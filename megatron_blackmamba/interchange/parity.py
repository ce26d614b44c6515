"""Check a conversion: bit-equal weights, and equal outputs from two implementations."""

import random

import torch
from torch import Tensor

from megatron_blackmamba.interchange import through_hf, through_megatron
from megatron_blackmamba.interchange.canonical import Canonical, InterchangeError, tokenizer_of
from megatron_blackmamba.interchange.observation import Comparison, compare
from megatron_blackmamba.layers import obstacles

TEXT = """A state-space model reads a sequence once, left to right, and keeps what it needs in a state of fixed size.
def first_primes(n: int) -> list[int]:
    return [p for p in range(2, n) if all(p % d for d in range(2, p))]
Thus, for every epsilon above zero, there is a delta such that |x - y| < delta implies |f(x) - f(y)| < epsilon."""


class ParityError(InterchangeError):
    """The converted model is not the one it came from."""


def check(ours: Canonical, theirs: Canonical) -> Comparison:
    """Compare one model, run by our megatron-core modules, with the other, run by the Hugging Face modeling files.

    If those have no class for one of its layers, the megatron-core modules run both.
    """
    same_weights(ours, theirs)
    tokens_BS = probe_tokens(ours)
    expected = through_megatron.observe(ours, tokens_BS)
    if obstacles(theirs.config):
        found = through_megatron.observe(theirs, tokens_BS)
    else:
        found = through_hf.observe(theirs, tokens_BS)
    comparison = compare(expected, found)
    if not comparison.agrees:
        raise ParityError(f"{theirs.source}: its weights are those of {ours.source}, its outputs do not: {comparison}")
    return comparison


def same_weights(one: Canonical, other: Canonical) -> None:
    for name, entry in one.entries.items():
        mine, its = entry.load(), other.entries[name].load()
        if mine.dtype != its.dtype or not torch.equal(mine, its):
            raise ParityError(f"{other.source}: {name} is not what {one.source} holds")


def probe_tokens(model: Canonical, length: int = 64) -> Tensor:
    """Return rows of random ids, plus a row of real text if the model has a tokenizer."""
    vocabulary = model.config.vocab_size
    rng = random.Random(0)
    rows = [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(2)]
    tokenizer = tokenizer_of(model)
    if tokenizer is not None:
        text = tokenizer.encode(TEXT)
        if model.config.eod_reset is not None:
            text.insert(length // 2, model.config.eod_reset)
        if text:
            rows.append((text * length)[:length])
    return torch.tensor(rows)
