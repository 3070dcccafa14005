"""Krippendorff's alpha: a published case, another package's figures, a loop, and properties."""

import math
import random
from itertools import permutations

import pytest

from lightning_rlhf.extras.judges.agreement import krippendorff_alpha

# Krippendorff (2011), part D: four observers grade twelve units, with missing grades; interval alpha 0.849.
PUBLISHED = [
    [1, 1, 1], [2, 2, 3, 2], [3, 3, 3, 3], [3, 3, 3, 3], [2, 2, 2, 2], [1, 2, 3, 4], [4, 4, 4, 4],
    [1, 1, 2, 1], [2, 2, 2, 2], [5, 5, 5], [1, 1], [3],
]  # fmt: skip


def test_two_judges_by_hand():
    """Units (0, 0), (1, 0): within, 0 and 2 x 1; of all values 0, 0, 1, 0, 2 x 3. alpha = 1 - 3 x 2 / 6 = 0."""
    assert krippendorff_alpha([[0, 0], [1, 0]]) == 0.0
    assert krippendorff_alpha([[0, 0], [1, 1]]) == 1.0
    # Units (0, 1), (1, 0): within, 2 + 2; of all values 2 x 4. alpha = 1 - 3 x 4 / 8 = -0.5.
    assert krippendorff_alpha([[0, 1], [1, 0]]) == -0.5


def test_published_case():
    assert krippendorff_alpha(PUBLISHED) == pytest.approx(0.849, abs=5e-4)


@pytest.mark.parametrize(
    ("units", "alpha"),
    [
        (PUBLISHED, 0.8491071428571428),
        (
            [[0.0, 0.25, 0.5], [0.25, 0.25, 0.0], [1.0, 0.75, 1.0], [0.75, 1.0, 0.5], [0.5, 0.0, 0.25]],
            0.6547085201793722,
        ),
        ([[0, 1], [1 / 3, 2 / 3], [2 / 3, 1 / 3], [1, 0]], -0.7500000000000002),
    ],
)
def test_figures_of_krippendorff_0_9_0(units, alpha):
    """krippendorff.alpha(reliability_data, level_of_measurement="interval") of krippendorff 0.9.0 on PyPI."""
    assert krippendorff_alpha(units) == pytest.approx(alpha, abs=1e-12)


def slow_alpha(units):
    """Compute alpha from the observed and the expected disagreement, by loops over ordered pairs."""
    units = [unit for unit in units if len(unit) > 1]
    values = [value for unit in units for value in unit]
    observed = expected = 0.0
    for unit in units:
        for a, b in permutations(range(len(unit)), 2):
            observed += (unit[a] - unit[b]) ** 2 / (len(unit) - 1)
    for a, b in permutations(range(len(values)), 2):
        expected += (values[a] - values[b]) ** 2
    n = len(values)
    return 1 - (observed / n) / (expected / (n * (n - 1)))


def test_alpha_equals_loops_and_ignores_order_shift_and_scale():
    draw = random.Random(1)
    for _ in range(30):
        units = [[draw.random() for _ in range(draw.randint(1, 4))] for _ in range(8)] + [[0.0, 1.0]]
        alpha = krippendorff_alpha(units)
        assert alpha == pytest.approx(slow_alpha(units), abs=1e-12)
        assert alpha <= 1
        assert krippendorff_alpha([unit[::-1] for unit in units[::-1]]) == pytest.approx(alpha, abs=1e-12)
        assert krippendorff_alpha([[3 * v - 7 for v in unit] for unit in units]) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize("units", [[], [[1]], [[1], [2]], [[1, 1], [1, 1]]])
def test_without_pairs_or_differences_alpha_is_not_a_number(units):
    assert math.isnan(krippendorff_alpha(units))
