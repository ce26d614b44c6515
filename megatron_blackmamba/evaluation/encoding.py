"""Context and continuation as tokens: together, as lm-eval does today, or separately, as lm-eval 0.3.0 did."""

from collections.abc import Iterable, Sequence

from megatron_blackmamba.evaluation.errors import EvaluationError
from megatron_blackmamba.formats.evaluations import Encoding
from megatron_blackmamba.tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]
AT_ONCE = 4096
"""Texts encoded in one call."""


def encode_pairs(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, encoding: Encoding) -> list[Pair]:
    """Return the tokens of each context and continuation. The end-of-document token stands for an empty context."""
    moved = [_without_trailing_spaces(*pair) if encoding is Encoding.joint else pair for pair in pairs]
    whole = [a + b if a and encoding is Encoding.joint else b for a, b in moved]
    known = _encode_distinct([*(a for a, _ in moved), *whole], tokenizer)
    found = [_pair(known[a], known[b], bool(a), encoding, tokenizer) for (a, _), b in zip(moved, whole, strict=True)]
    for (_, rest), (context, continuation) in zip(found, moved, strict=True):
        if continuation and not rest:  # scored as certain, it would always win
            raise EvaluationError(
                f"the continuation {continuation!r} has no token of its own: the tokenizer merges it with the end of"
                f" its context, {context[-40:]!r}. Use --encoding separate"
            )
    return found


def _pair(context: list[int], rest: list[int], has_context: bool, encoding: Encoding, tokenizer: Tokenizer) -> Pair:
    if not has_context:
        if encoding is Encoding.joint and rest[:1] == [tokenizer.eod_id]:
            return rest[:1], rest[1:]
        return [tokenizer.eod_id], rest
    return (context, rest[len(context) :]) if encoding is Encoding.joint else (context, rest)


def _without_trailing_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move spaces at the end of the context to the continuation, where tokenizers expect them."""
    kept = context.rstrip()
    return (kept, context[len(kept) :] + continuation) if kept else (context, continuation)


def _encode_distinct(texts: Iterable[str], tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Encode each text once, as the `hf` backend does: text that spells a special token becomes that token."""
    distinct = list(dict.fromkeys(texts))
    found: dict[str, list[int]] = {}
    for start in range(0, len(distinct), AT_ONCE):
        some = distinct[start : start + AT_ONCE]
        ids, lengths = tokenizer.encode_batch(some, special_text=True)
        ends = lengths.cumsum().tolist()
        for text, first, last in zip(some, [0, *ends], ends, strict=False):
            found[text] = ids[first:last].tolist()
    return found
