"""Values as people write them: 300B, 1e3, and one value instead of a list."""

import re
from fractions import Fraction
from typing import Any, get_args, get_origin

NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)([kKMGBT])")
_SCALE = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def number(value: Any, annotation: Any) -> Any:
    """Return 300B as 300 000 000 000 where the field is a whole number."""
    wanted = (annotation, *get_args(annotation))
    match = NUMBER.fullmatch(value) if isinstance(value, str) and int in wanted else None
    if match is None:
        return value
    scaled = Fraction(match[1].replace("_", "")) * _SCALE[match[2]]  # as a float, 4.1B would not be a whole number
    return int(scaled) if scaled.denominator == 1 else value


def whole(value: Any) -> Any:
    """Return 1e3 and 1K as 1000, as a field that is a whole number reads them."""
    scaled = number(value, int)
    return int(scaled) if isinstance(scaled, float) and scaled.is_integer() else scaled


def listed(value: Any, annotation: Any) -> Any:
    """Return one value as a list where the field is a list."""
    wants = get_origin(annotation) is list
    return [value] if wants and isinstance(value, (str, int, float)) else value
