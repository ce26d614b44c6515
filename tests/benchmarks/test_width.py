"""The coordinate check and the sweep over widths."""

import pytest

from benchmarks import coordinates, width_transfer


def test_exponent_is_the_slope():
    assert coordinates.exponent({2: 3.0, 8: 6.0, 32: 12.0}) == pytest.approx(0.5)


@pytest.mark.parametrize("letter", ["M", "E"])
def test_width_transfer_keeps_changes_stable(letter):
    with_, without = (
        {width: coordinates.sizes([], letter, width, base, steps=2) for width in (32, 128)} for base in (32, None)
    )
    rows = coordinates.rows(with_, without)
    for row in (row for row in rows if row["value"] in ("logits", "output") or "do not grow" in row["value"]):
        first, change = (float(row[f"µP: {when}"]) for when in ("at first", "change"))
        assert first < 0.3 and abs(change) < 0.6, row
        assert float(row["without: change"]) > change + 0.3, row


def test_best_rate_is_lowest_point_of_a_parabola():
    def losses(shift):
        return {rate: (k - shift) ** 2 for k, rate in enumerate((1.0, 2.0, 4.0, 8.0))}

    assert width_transfer.best(losses(1.4)) == pytest.approx(2**1.4)
    assert width_transfer.best(losses(7)) == 8.0  # at the end of the grid there is no parabola
