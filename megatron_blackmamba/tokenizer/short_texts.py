"""Short texts encoded together: the separators that keep the ids of each text, and how to take the ids apart again.

Encoding libraries spend about a microsecond on each text, which is most of their time at the length of a tweet. Many
texts are therefore joined into one. A separator may be used only if the ids of a text cannot depend on its neighbours:

- The end-of-document token. Tokenizers split at special tokens before all else.
- A vertical tab and `'s`, with GPT-2's regular expression and no normalizer or NFC. It is faster, since the joined text
  stays in one piece. Its matches never span the separator: the tab is white space, after which `\\s+(?!\\S)` leaves the
  spaces at the end of a text as they are alone, and it is no space that a word may begin with. `'s` is a match whatever
  follows, and the expression does not look back. Marks at the start of a text may combine with the `s` in NFC. Then the
  separator's ids are missing, and the texts are encoded alone.

Tokenizers with parts that are not listed here encode each text alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SHORT_TEXT = 400
"""Mean length in characters below which texts are encoded together."""
TOGETHER = 256
"""Texts that are joined into one."""
MOST_SEARCHED = 8
"""Special tokens that are searched for in texts; tokenizers with more do not use the end-of-document token."""

Flat = Callable[[Sequence[str], bool], tuple[np.ndarray, np.ndarray]]
"""Encode texts, with special tokens or without: all ids, and the length of each text."""

_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits"}
_TAB = "\v's"
_TAB_TOKEN = "\u010b"
"""The vertical tab in byte-level vocabularies."""


@dataclass(frozen=True)
class Separator:
    """Text between joined texts, and the ids that it becomes."""

    text: str
    ids: tuple[int, ...]
    special: bool
    """Encode special tokens as such; `absent` lists those that no text may contain."""
    absent: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str], flat: Flat) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the ids of all texts and the length of each, or None if the texts must be encoded alone."""
        groups = [self.text.join([*texts[i : i + TOGETHER], ""]) for i in range(0, len(texts), TOGETHER)]
        if any(token in group for group in groups for token in self.absent):
            return None
        if self.special and sum(group.count(self.text) for group in groups) != len(texts):
            return None
        ids, _ = flat(groups, self.special)
        starts = np.flatnonzero(ids == self.ids[0])
        if len(starts) != len(texts) or (len(starts) and starts[-1] + len(self.ids) > len(ids)):
            return None
        is_text = np.ones(len(ids), bool)
        for place, expected in enumerate(self.ids):
            if not (ids[starts + place] == expected).all():
                return None
            is_text[starts + place] = False
        return ids[is_text], np.diff(starts, prepend=-len(self.ids)) - len(self.ids)

    def is_exact(self, texts: Sequence[str], flat: Flat) -> bool:
        """Return whether those texts that can be encoded together have the ids that they have alone."""
        suitable = [text for text in texts if self.encode([text], flat) is not None]
        together = self.encode(suitable, flat)
        return bool(suitable) and together is not None and all(map(np.array_equal, together, flat(suitable, False)))


def separators(
    data: dict[str, Any], eod_token: str, eod_id: int, encode: Callable[[str], list[int]]
) -> Iterator[Separator]:
    """Yield the separators that the content of a tokenizer.json allows, the fastest first.

    encode: returns the ids of a text.
    """
    added = data.get("added_tokens") or []
    if (data.get("model") or {}).get("type") != "BPE" or any(
        token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")
    ):
        return
    if _is_gpt2(data) and not any(_overlap(token["content"], _TAB) for token in added):
        ids = encode(_TAB)
        if encode("\v") == ids[:1] and (data["model"].get("vocab") or {}).get(_TAB_TOKEN) == ids[0]:
            yield Separator(_TAB, tuple(ids), special=False)
    special = [token for token in added if token["special"]]
    others = tuple(token["content"] for token in added if token["content"] != eod_token)
    if (
        _is_known(data.get("normalizer"), "normalizers", _NORMALIZERS)
        and _is_known(data.get("pre_tokenizer"), "pretokenizers", _PRE_TOKENIZERS)
        and eod_token in [token["content"] for token in special]
        and len(special) <= MOST_SEARCHED
        and not any(token.get("normalized") for token in special)
        and not any(_overlap(token, eod_token) for token in others)
    ):
        absent = tuple(token["content"] for token in special if token["content"] != eod_token)
        yield Separator(eod_token, (eod_id,), special=True, absent=absent)


def _is_gpt2(data: dict[str, Any]) -> bool:
    """Return whether texts are split by GPT-2's regular expression, after NFC at most."""
    pre_tokenizer = data.get("pre_tokenizer") or {}
    return (
        _is_known(data.get("normalizer"), "normalizers", {"NFC"})
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("use_regex", True)
        and not pre_tokenizer.get("add_prefix_space", True)
    )


def _is_known(part: dict[str, Any] | None, members: str, known: set[str]) -> bool:
    """Return whether a part of the tokenizer is absent, known, or a sequence of known ones."""
    if part is None:
        return True
    if part.get("type") == "Sequence":
        return all(_is_known(member, members, known) for member in part.get(members) or [{}])
    return part.get("type") in known


def _overlap(token: str, separator: str) -> bool:
    """Return whether an occurrence of the token could share characters with the separator."""
    return (
        token in separator
        or separator in token
        or any(token.endswith(separator[:n]) or token.startswith(separator[-n:]) for n in range(1, len(separator)))
    )
