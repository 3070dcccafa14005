"""Clipping, weight, and the score of what never ended."""

import pytest
import torch

from lightning_rlhf.rewards.shaping import ScoreShaping
from tests.helpers import assert_close

SCORES = torch.tensor([-5.0, -1.0, 0.5, 9.0])
TRUNCATED = torch.tensor([False, True, False, True])


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (ScoreShaping(), [-5, -1, 0.5, 9]),
        (ScoreShaping(clip=2.0), [-2, -1, 0.5, 2]),
        (ScoreShaping(truncated_score=-1.5), [-5, -1.5, 0.5, -1.5]),
        (ScoreShaping(weight=0.5, clip=2.0, truncated_score=-3.0), [-1, -1, 0.25, -1]),  # clipped, then weighted
        (ScoreShaping(weight=0.0), [0, 0, 0, 0]),
    ],
)
def test_by_hand(shaping, expected):
    assert_close(shaping(SCORES, TRUNCATED), torch.tensor(expected, dtype=torch.float))


def test_the_scores_given_are_left_alone():
    ScoreShaping(clip=1.0, truncated_score=-1.0)(SCORES, TRUNCATED)
    assert SCORES.tolist() == [-5, -1, 0.5, 9]


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_clip_must_be_positive(clip):
    with pytest.raises(ValueError, match="score clip must be positive or null"):
        ScoreShaping(clip=clip)
