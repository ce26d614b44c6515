"""Confidence of a mean over seeds or steps, by Student's t."""

import math
import statistics
from collections.abc import Sequence

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5% points of Student's t by number of values."""
NORMAL_95 = 1.959964


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95% confidence interval of the mean; None from one value."""
    if len(values) < 2:
        return None
    return _t_95(len(values)) * statistics.stdev(values) / math.sqrt(len(values))


def side_of(values: Sequence[float], limit: float = 0.0) -> int:
    """Return 1 if the 95% interval of the mean lies above a limit, -1 if below it, else 0; from one value too."""
    half = half_interval(values)
    less = statistics.fmean(values) - limit
    return 0 if half is None or abs(less) <= half else 1 if less > 0 else -1


def mean_of(values: Sequence[float], sign: str = "") -> str:
    """Return the mean for people, with its 95% confidence interval if there is one; `sign` is + or nothing."""
    half = half_interval(values)
    return f"{statistics.fmean(values):{sign}.3f}" + ("" if half is None else f" ± {half:.3f}")


def _t_95(values: int) -> float:
    """Return the 97.5% point for a number of values; above the table, by the expansion around the normal one."""
    z, freedom = NORMAL_95, values - 1
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return T_95.get(values) or z + first / freedom + second / freedom**2 + third / freedom**3
