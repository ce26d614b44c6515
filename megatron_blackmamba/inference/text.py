"""Decode tokens into text incrementally."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_blackmamba.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """Some more text of one row. `finished` says why a row ended: at a stop (string or token), or at the length."""

    row: int
    text: str
    finished: Literal["stop", "length"] | None = None


class Text:
    """The text of one row.

    A character may take several tokens, and is held back until it is whole. So is what may become a stop string.

    prompt: The tokens that it continues.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self.ended = False
        self.pending: list[int] = []
        self.before = _last_character(tokenizer, prompt)
        """Tokens before it, kept since how a token reads may depend on the one before it."""
        self.held = ""

    def add(self, token: int) -> str:
        """Take a token; return what can be given out."""
        self.pending.append(token)
        text = self._read()
        if text.endswith("\ufffd") and len(self.pending) < 8:
            return ""
        return self._give(self._release(text), final=False)

    def rest(self) -> str:
        """Return what was held back, once no token follows."""
        return self._give(self._release(self._read()) if self.pending else "", final=True)

    def _give(self, text: str, final: bool) -> str:
        text = self.held + text
        found = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if self.stopped or found:
            self.stopped, self.held = True, ""
            return text[: min(found, default=0)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _read(self) -> str:
        known = self.tokenizer.decode(self.before)
        return self.tokenizer.decode(self.before + self.pending)[len(known) :]

    def _release(self, text: str) -> str:
        self.before, self.pending = self.pending, []
        return text


def _last_character(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt that are whole characters; none at the end of a document or within one."""
    if not prompt or prompt[-1] == tokenizer.eod_id:
        return []
    endings = ([*prompt[-size:]] for size in range(1, 1 + min(8, len(prompt))))
    return next((ending for ending in endings if "\ufffd" not in tokenizer.decode(ending)), [])


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text could start the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
