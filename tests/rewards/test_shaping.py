"""Clipping, weight, the score of truncated responses, and the length penalty."""

import pytest
import torch

from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rewards.shaping import OverlongPenalty, ScoreShaping
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
def test_shaping_of_known_scores(shaping, expected):
    assert_close(shaping(SCORES, TRUNCATED), torch.tensor(expected, dtype=torch.float))


def test_input_scores_are_not_changed():
    ScoreShaping(clip=1.0, truncated_score=-1.0)(SCORES, TRUNCATED)
    assert SCORES.tolist() == [-5, -1, 0.5, 9]


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_clip_must_be_positive(clip):
    with pytest.raises(ValueError, match="score clip must be positive or null"):
        ScoreShaping(clip=clip)


def test_length_penalty_of_known_lengths():
    """Limit 10, slope over the last 4 tokens: 0 up to 6, half at 8, full from 10."""
    penalty = OverlongPenalty(max_tokens=10, buffer_tokens=4)
    assert penalty([[0] * length for length in (0, 6, 7, 8, 10, 12)]) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_length_penalty_is_a_reward_function():
    reward = RewardFunction(OverlongPenalty(4, 2), weight=0.5, name="overlong")
    reward.check([])
    assert compute_reward(
        reward, prompts=["", ""], completions=["", ""], completion_ids=[[1], [1, 2, 3, 4]]
    ).tolist() == [0.0, -1.0]


@pytest.mark.parametrize("buffer", [0, 11])
def test_invalid_buffer_raises_an_error(buffer):
    with pytest.raises(ValueError, match=rf"^buffer_tokens must be in \[1, max_tokens=10\], got {buffer}$"):
        OverlongPenalty(10, buffer)
