"""Tokenizers as llama.cpp has them: byte-level BPE, whose rule for cutting text into words it knows by name only."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_blackmamba.interchange.canonical import InterchangeError
from megatron_blackmamba.tokenizer import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens in the format."""
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SINCE_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT = r"\p{N}"
NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((GPT_2,), False): "gpt-2",
    ((DIGIT, GPT_2), False): "starcoder",
    ((SINCE_GPT_4.replace("DIGITS", r"\p{N}"),), False): "qwen2",
    ((SINCE_GPT_4.replace("DIGITS", r"\p{N}{1,3}"),), False): "smaug-bpe",
    ((SINCE_GPT_4.replace("DIGITS", r"\p{N}{1,3}"),), True): "llama-bpe",
}
"""llama.cpp's names of pre-tokenizers, by their patterns and whether words in the vocabulary are taken whole."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in terms of llama.cpp."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    end: int
    warning: str | None

    def keys(self) -> dict[str, Any]:
        """Return what GGUFWriter adds, by the ends of its methods. As in training, prompts get no further token."""
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), self.end)
        return {
            "tokenizer_model": "gpt2",
            "tokenizer_pre": self.pre,
            "token_list": self.tokens,
            "token_types": self.types,
            "token_merges": self.merges,
            **ends,
            "add_bos_token": False,
            "add_eos_token": False,
        }


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Return a tokenizer for a model of `size` ids; refuse one that llama.cpp does not have."""
    content = json.loads(tokenizer.content)
    model = content["model"]
    reasons = list(_reasons(content))
    patterns = tuple(_patterns(content.get("pre_tokenizer") or {}))
    pre = NAMES.get((patterns, bool(model.get("ignore_merges"))))
    if pre is None:
        reasons.append(
            f"its pre_tokenizer {json.dumps(content.get('pre_tokenizer'))} is not one that llama.cpp has: byte-level "
            "words of GPT-2, StarCoder, Qwen 2 or Llama 3"
        )
    if reasons or pre is None:
        raise InterchangeError(f"{tokenizer.name}: llama.cpp cannot tokenize as it does: {'; '.join(reasons)}")
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, NORMAL
    for token in content.get("added_tokens") or []:
        special = token["special"] or token["id"] == tokenizer.eod_id
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if special else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(pre, tokens, types, merges, tokenizer.eod_id, _warning(content, tokenizer))


def _reasons(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what llama.cpp lacks, apart from the pre-tokenizer."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        yield f"its model is {model.get('type')}, not BPE"
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            yield f"model.{name} is {model[name]!r}"
    for token in content.get("added_tokens") or []:
        for name in ("lstrip", "rstrip", "single_word"):
            if token.get(name):
                yield f"its token {token['content']!r} has {name}"
    if any(each != "NFC" for each in _normalizers(content)):
        yield f"its normalizer is {json.dumps(content['normalizer'])}"


def _warning(content: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    if not _normalizers(content):
        return None
    return f"{tokenizer.name} normalizes text to NFC, which llama.cpp does not: give it text in NFC, as most is"


def _normalizers(content: Mapping[str, Any]) -> list[str]:
    normalizer = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
    return [each["type"] for each in normalizer.get("normalizers", [normalizer])]


def _patterns(pre_tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the patterns that cut text one after the other; "" for what is none."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    for i, step in enumerate(steps):
        kind, last = step.get("type"), i == len(steps) - 1
        pattern = (step.get("pattern") or {}).get("Regex", "")
        keeps_all = (step.get("behavior"), step.get("invert")) in {("Isolated", False), ("Removed", True)}
        if kind == "ByteLevel" and last and not step.get("add_prefix_space", True):
            if step.get("use_regex", True):
                yield GPT_2
        elif kind == "Split" and keeps_all and not last:
            yield pattern
        elif kind == "Digits" and step.get("individual_digits") and not last:
            yield DIGIT
        else:
            yield ""
