"""A few of the layouts of `layout_grid`: hybrids in parts, beside each other kind of parallelism."""

import pytest

from tests.distributed import layout_grid
from tests.runtime.ranks import fork_script

pytestmark = pytest.mark.xdist_group("layouts")


@pytest.fixture(scope="module")
def rows():
    return fork_script("tests.distributed.layout_grid", "--sample", "--steps", "2")


@pytest.mark.parametrize("what", ["losses", "norms", "gradients"])
def test_hybrids_in_parts_match_one_process(rows, what):
    assert len(rows) == len(layout_grid.SAMPLE)
    assert max(row[what] for row in rows) < layout_grid.CLOSENESS


def test_sample_has_every_pattern_and_kind_of_parallelism():
    patterns, documents, contexts, beside = (set(column) for column in zip(*layout_grid.SAMPLE, strict=True))
    assert patterns == set(layout_grid.PATTERNS) and documents == set(layout_grid.DOCUMENTS)
    assert contexts == set(layout_grid.CONTEXTS) and beside == set(layout_grid.BESIDE)
