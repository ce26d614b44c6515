"""The words of a text as decontamination compares them, and how much each tells of where a text is from.

Case, accents, punctuation and invisible characters do not count, nor do numbers and marks that begin a line, as in
lists and listings. All other numbers count as they are.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import regex

_COMMON = """
the a and to of in is for that with on it are as or be by from you an s this at have they not if
when can into one will more how was use all but what his also their which time used he other her t
some do around get see only there your same most two may new than has any she about were no so after
up make over first like should using i out number its down through made many each where way example
who would before high these water such then well day while long people because area being both does
need set m ball off help until must take him home type them another find between life back place
different called c could best without name still right small body very under re found following
table often end during white once been own we part large light room system want even work size
process three years information go open red keep together always group include just don last line
left order black now air away every length d oil won car along much run change color ground point
next man old result either based provide put several try able less level did person things within
making least free form current since those field had main common local year state again available
good released top us few great full family school low dark why specific become half read hand list
house days base space food release instead types going having case building glass across hands
inside longer stop second step side night start development little possible against box times green
uses bit better cup floor outside remove quickly wall move show world below blue areas love though
dead too turn near feet head call given others salt four short thing doesn center eyes mother non
per live cause certain hours present true getting come men takes parents including already force
lower directly cold support control parts contains seen pull range return stay makes else book above
allow milk smaller moving temperature however larger method added bar children container date
similar kind front minutes whole deep follow running here natural dog flat our simple single taking
break important due skin young never check close f event eat straight cannot material b unit match
test travel hot simply build runs something done eye heat wheel add enough hair know passed required
five leave products child power rather tool various results special allows contain normal whether
tree hit mark money paper job later separate section except known living product changes age built
company give lead learn related human general plant amount throughout includes machine native play
dry elements heart iron means pressure relationship behavior strong comes fire fruit girl property
blood clear described needs sure containing note started today word office created fast father g
months numbers slowly tools total rules considered needed systems bottom questions baby bad care
earth ring sound physical might record business class ice street access self sugar motion positive
actually real brown hold
"""
COMMON = tuple(_COMMON.split())
"""English words, the most frequent first, by the median of their shares in five kinds of text.

These are stories, an encyclopedia, questions of science, descriptions of videos and software documentation.
"""
MOST_BITS = 13.0
"""Information of a word that is not common. A common one of rank r has log2(15.4 r), since its share is 0.065 / r."""
_LETTER_BITS = math.log2(26)

_BITS = {word: min(math.log2(15.4 * rank), MOST_BITS) for rank, word in enumerate(COMMON, start=1)}
_IDEOGRAPHS = "\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")
_ASCII_WORD = re.compile(r"[a-z0-9]+")
_INVISIBLE = regex.compile(r"[\p{Mn}\p{Cf}]+")
"""Accents, once they are characters of their own, and characters without a width, such as U+200B."""
_LISTING = re.compile(r"^([^\w\n]*)(\d{1,6})(?=[.):\]|]+\s|\t| {2})", re.MULTILINE)
"""A number that begins a line: of a list, or of a listing."""

SplitWords = Callable[[str], Sequence[str]]
"""Splits normalized text into words."""


def bits(word: str) -> float:
    """Return the information of a word. Numbers have none; a word has at most that of random letters."""
    known = _BITS.get(word)
    if known is not None:
        return known
    letters = sum(character.isalpha() for character in word)
    return min(MOST_BITS, _LETTER_BITS * letters)


def information(words: Iterable[str]) -> float:
    """Return the bits of a text, the sum over its distinct words."""
    return sum(map(bits, set(words)))


def normalize(text: str) -> str:
    """Return the text as it is split into words."""
    text = text.lower() if text.isascii() else _fold(text)
    return _LISTING.sub(_blank, text)


def split_words(normalized: str) -> list[str]:
    """Split normalized text: an ideograph is a word, and so is a run of other letters and digits."""
    return (_ASCII_WORD if normalized.isascii() else _WORD).findall(normalized)


def spans(text: str, words: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return where in the text each of its words begins and ends, or None if a word splitter changed them."""
    if text.isascii():
        normalized, places = text.lower(), range(len(text) + 1)
    else:
        folded = [_fold_one(character) for character in text]
        normalized = "".join(folded)
        places = [place for place, part in enumerate(folded) for _ in part]  # type: ignore[assignment]
    normalized = _LISTING.sub(_blank, normalized)
    found, at = [], 0
    for word in words:
        at = normalized.find(word, at)
        if at < 0:
            return None
        found.append((places[at], places[at + len(word) - 1] + 1))
        at += len(word)
    return found


def _fold(text: str) -> str:
    text = unicodedata.normalize("NFKD", text)  # first, since 𝐀 and ™ have no case before
    return str(_INVISIBLE.sub("", unicodedata.normalize("NFKD", text.casefold())))


_fold_one = lru_cache(maxsize=4096)(_fold)


def _blank(number: re.Match[str]) -> str:
    return number[1] + " " * len(number[2])
