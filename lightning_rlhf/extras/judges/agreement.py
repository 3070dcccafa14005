"""Agreement of several judges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain


def krippendorff_alpha(units: Iterable[Sequence[float]]) -> float:
    r"""Return Krippendorff's alpha for grades on an interval scale: 1 for equal grades, 0 for agreement by chance.

    .. math::
        \alpha = 1 - (n - 1) \frac{\sum_u \frac{1}{m_u - 1} \sum_{i, j \in u} (v_i - v_j)^2}{\sum_{i, j} (v_i - v_j)^2}

    with the :math:`m_u` grades of response u and n grades in all; a response with a single grade is left out.

    Source: Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), part D, with the interval difference.

    Args:
        units: grades of each response.

    Returns:
        Alpha, at most 1; NaN without two grades of a response, or if all grades are equal.
    """
    pairable = [unit for unit in units if len(unit) > 1]
    values = list(chain.from_iterable(pairable))
    expected = _squared_differences(values) / (len(values) - 1) if values else 0.0
    if expected == 0.0:
        return math.nan
    return 1.0 - math.fsum(_squared_differences(unit) / (len(unit) - 1) for unit in pairable) / expected


def _squared_differences(values: Sequence[float]) -> float:
    """Return the sum of squared differences over all ordered pairs."""
    mean = math.fsum(values) / len(values)
    return 2 * len(values) * math.fsum((value - mean) ** 2 for value in values)
