"""The order in which the tests begin: the longest groups first."""

import re
from pathlib import Path

from tests.conftest import LONGEST_FIRST, pytest_collection_modifyitems

TESTS = Path(__file__).parent


def test_every_long_group_has_tests():
    text = "".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    assert set(LONGEST_FIRST) <= set(re.findall(r'xdist_group\("(\w+)"\)', text))


def test_longest_groups_begin_first(request):
    items = request.session.items[::-1]
    pytest_collection_modifyitems(items)
    marks = [item.get_closest_marker("xdist_group") for item in items]
    places = [LONGEST_FIRST.index(mark.args[0]) for mark in marks if mark and mark.args[0] in LONGEST_FIRST]
    assert places == sorted(places)
