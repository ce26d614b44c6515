"""Tests that `make test` leaves to `make test-all`: more cases of what the others test in one.

A case is everyday if a fault that developers make would not show without it. `pytest FILE` runs both.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def unless(everyday: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test, those that are not everyday marked as thorough."""
    names = list(names)
    assert set(everyday) <= set(names), set(everyday) - set(names)
    return [name if name in everyday else pytest.param(name, marks=thorough) for name in names]


def selected(request: pytest.FixtureRequest, argument: str = "name") -> list[Any]:
    """Return the values of an argument that the selected tests of this file have, each once."""
    items = (item for item in request.session.items if item.path == request.path)
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[argument] for params in calls if argument in params))
