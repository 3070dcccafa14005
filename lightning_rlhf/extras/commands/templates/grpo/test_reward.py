"""Tests; python -m pytest runs them."""

from reward import right


def test_right_and_wrong_answers():
    assert right(["3 + 4 = 7", "It is 8.", "I do not know", "1,000"], ["7", "7", "7", "1000"]) == [1.0, 0.0, 0.0, 1.0]
