"""The text of a record: one field, a dotted path into it, or several of them joined."""

from collections.abc import Callable, Sequence
from typing import Any

from data_tools.rejects import MISSING_FIELD, NOT_A_STRING

TakeText = Callable[[Any], str]


class FieldError(Exception):
    """A record without the text that was asked for."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def text_of(fields: Sequence[str], joiner: str) -> TakeText:
    """A function from a record to its text. `meta.text` goes down one level; `body[].text` goes through a list and
    joins what it finds, as several fields are joined."""
    if len(fields) == 1:
        return _single(fields[0], joiner)
    parts = [_single(field, joiner) for field in fields]
    return lambda record: joiner.join([part(record) for part in parts])


def root_columns(fields: Sequence[str], available: Sequence[str]) -> list[str]:
    """The columns of a table that the fields live in; a missing one is returned as it was asked for."""
    return [field if field in available else _steps(field)[0].removesuffix("[]") for field in fields]


def _single(field: str, joiner: str) -> TakeText:
    steps = _steps(field)

    def take(record: Any) -> str:
        try:
            text = record[field]
        except KeyError:
            if len(steps) == 1 and not field.endswith("[]"):
                raise FieldError(MISSING_FIELD, f"no `{field}`; it has {_names(record)}") from None
            text = _walk(record, steps, field, joiner)
        except TypeError:
            raise FieldError(
                MISSING_FIELD, f"the record is {_kind(record)}, not an object with `{field}`{_advice(record)}"
            ) from None
        if type(text) is not str:
            raise FieldError(NOT_A_STRING, f"`{field}` is {_kind(text)}")
        return text

    return take


def _walk(value: Any, steps: Sequence[str], field: str, joiner: str) -> Any:
    for depth, step in enumerate(steps):
        name = step.removesuffix("[]")
        if not isinstance(value, dict):
            raise FieldError(MISSING_FIELD, f"`{field}`: above `{name}` stands {_kind(value)}, not an object")
        if name not in value:
            raise FieldError(MISSING_FIELD, f"`{field}`: no `{name}`; there is {_names(value)}")
        value = value[name]
        if name != step:
            if not isinstance(value, list):
                raise FieldError(NOT_A_STRING, f"`{field}`: `{name}` is {_kind(value)}, not a list")
            rest = steps[depth + 1 :]
            items = [_walk(item, rest, field, joiner) for item in value]
            odd = [item for item in items if type(item) is not str]
            if odd:
                raise FieldError(NOT_A_STRING, f"`{field}`: an item is {_kind(odd[0])}")
            return joiner.join(items)
    return value


def _steps(field: str) -> list[str]:
    return field.split(".")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    names |= {str: "a string", bytes: "bytes"}
    return names.get(type(value), f"a {type(value).__name__}")


def _advice(record: Any) -> str:
    return "; `jq -c '.[]'` makes JSON lines of a list of objects" if isinstance(record, list) else ""


def _names(record: Any, most: int = 8) -> str:
    if not isinstance(record, dict):
        return _kind(record)
    names = [f"`{name}`" for name in record]
    return ", ".join(names[:most] + ["..."] * (len(names) > most)) or "no field at all"
