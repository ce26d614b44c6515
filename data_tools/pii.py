"""Replacement of email and IP addresses as datatrove does it, in time proportional to the length of the text."""

import re
from collections.abc import Iterator
from typing import Any

try:
    from datatrove.pipeline.formatters import PIIFormatter
except ImportError:  # said by `require_datatrove`
    PIIFormatter = object

_AT = "@"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_DOT_ATOM = rf"{_ATOM}+(?:\.{_ATOM}+)*"
_BACKWARDS = re.compile(_DOT_ATOM)
"""A local part, read from its end: it is a word of atoms and single dots in both directions."""
_BEGIN = re.compile(rf"\b{_ATOM}")


class Pii(PIIFormatter):
    """datatrove's replacement of email and IP addresses, which begins anew with each document."""

    def filter(self, document: Any) -> bool:
        counts = {}
        if self.remove_emails:
            document.text, counts["emails"] = self._replaced(self.emails_replacer, document.text)
        if self.remove_ips:
            document.text, counts["addresses"] = self._replaced(self.ip_replacer, document.text)
        document.metadata["replaced"] = {"emails": 0, "addresses": 0} | counts
        return True

    def _replaced(self, replacer: Any, text: str) -> tuple[str, int]:
        """Return the text with the replacements of a replacer of datatrove, and their number."""
        spans = self._emails(text) if replacer is self.emails_replacer else map(re.Match.span, _all(replacer, text))
        parts, end, count = [], 0, 0
        for begin, stop in spans:
            if replacer.validator and not replacer.validator(text[begin:stop]):
                continue
            parts += [text[end:begin], replacer.replacements[count % len(replacer.replacements)]]
            end, count = stop, count + 1
        return "".join([*parts, text[end:]]), count

    def _emails(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield what datatrove's regex finds, whose search for the beginning takes quadratic time.

        A local part ends at the first @ behind its beginning. So each @ is looked at once, backwards and forwards.
        """
        domain = re.compile(self.emails_replacer.regex.pattern[self.emails_replacer.regex.pattern.index(_AT) :])
        least, at = 0, text.find(_AT)
        while at >= 0:
            local = _BACKWARDS.match(text[least:at][::-1])
            begin = local and _BEGIN.search(text, at - local.end(), at)
            found = begin and domain.match(text, at)
            if begin and found:
                yield begin.start(), found.end()
            least = found.end() if begin and found else at + 1
            at = text.find(_AT, least)


def _all(replacer: Any, text: str) -> Iterator[re.Match[str]]:
    return replacer.regex.finditer(text)
