"""The fields of a record beside its text, which a cleaning keeps: taken from the record, and written as JSON."""

import base64
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from megatron_blackmamba.data_tools.fields import OPTIONAL

RENAMED = "input_"
"""Begins the name of a field that this project also writes, such as `text`."""

MOST_DEPTH = 250
"""Objects and lists inside each other that can be written: orjson has a limit, and Python's encoder another."""


def too_deep(line: bytes, record: Any) -> bool:
    """Return whether a record cannot be written again; `line` is its JSON."""
    if line.count(b"[") + line.count(b"{") <= MOST_DEPTH:
        return False
    level = [record]
    for _ in range(MOST_DEPTH):
        inside = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in inside for item in items if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def without_text(fields: Sequence[str]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that takes the fields with the text out of a record and returns the rest."""
    names = [field.removesuffix(OPTIONAL) for field in fields]

    def rest(record: dict[str, Any]) -> dict[str, Any]:
        for name in names:
            if record.pop(name, None) is None:
                _remove(record, name.split("."))
        return record

    return rest


def _remove(value: Any, steps: Sequence[str]) -> None:
    if not isinstance(value, dict):
        return
    name = steps[0].removesuffix("[]")
    if len(steps) == 1:
        value.pop(name, None)
        return
    inside = value.get(name)
    for item in inside if isinstance(inside, list) else [inside]:
        _remove(item, steps[1:])


def origin_of(rest: dict[str, Any]) -> dict[str, Any]:
    """Take the raw file and record out of the fields of a cleaned document."""
    if isinstance(rest.get("file"), str) and type(rest.get("record")) is int:
        return {key: rest.pop(key) for key in ("file", "record")}
    return {}


def beside(ours: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Return our fields and the input's. If both have a name, `input_` begins the input's."""
    record = dict(ours)
    for name, value in rest.items():
        while name in record:
            name = RENAMED + name
        record[name] = value
    return record


def line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON: numbers that are none are null, dates are text."""
    try:
        return orjson.dumps(record, default=_plain, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an integer of more than 64 bits, half of a surrogate pair, or names that are no text
        return json.dumps(_finite(record), default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
