"""The text of a record: one field, a dotted path into it, or several of them joined."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron_blackmamba.data_tools.rejects import MISSING_FIELD, NOT_A_STRING

TakeText = Callable[[Any], str]
OPTIONAL = "?"


class FieldError(Exception):
    """A record without the text that was asked for."""

    def __init__(self, reason: str, detail: str, null: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.null = reason, detail, null


def text_of(fields: Sequence[str], joiner: str) -> TakeText:
    """Return a function from a record to its text. `meta.text` goes down one level; `body[].text` goes through a list
    and joins what it finds, as several fields are joined. `title?` is left out where it is missing or null."""
    if len(fields) == 1 and not fields[0].endswith(OPTIONAL):
        return _single(fields[0], joiner)
    parts = [_optional(field, joiner) if field.endswith(OPTIONAL) else _single(field, joiner) for field in fields]

    def take(record: Any) -> str:
        found = [text for part in parts if (text := part(record)) is not None]
        if not found:
            names = ", ".join(f"`{field}`" for field in fields)
            raise FieldError(MISSING_FIELD, f"none of {names}; it has {_names(record)}")
        return joiner.join(found)

    return take


def root_columns(fields: Sequence[str], available: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the columns of a table that the fields live in, and those that are needed and missing."""
    columns: dict[str, bool] = {}  # whether it may be missing
    for field in fields:
        name = field.removesuffix(OPTIONAL)
        column = name if name in available else name.split(".")[0].removesuffix("[]")
        columns[column] = columns.get(column, True) and field.endswith(OPTIONAL)
    there = [column for column in columns if column in available]
    absent = [column for column, optional in columns.items() if column not in available and not optional]
    return there, absent if there or absent else list(columns)


def _optional(field: str, joiner: str) -> Callable[[Any], str | None]:
    take = _single(field.removesuffix(OPTIONAL), joiner)

    def take_if_there(record: Any) -> str | None:
        try:
            return take(record)
        except FieldError as error:
            if error.null or (error.reason == MISSING_FIELD and isinstance(record, dict)):
                return None
            raise

    return take_if_there


def _single(field: str, joiner: str) -> TakeText:
    steps = field.split(".")

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
            raise FieldError(NOT_A_STRING, f"`{field}` is {_kind(text)}", null=text is None)
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
