"""Tests; python -m pytest runs them."""

from environment import Guessing


def test_a_game():
    game = Guessing()
    game.reset({"largest": 10}, seed=1)
    assert game.step("hello") == "Answer with a number."
    assert game.step("0") == "higher"
    assert game.step("11") == "lower"
    last = game.step(f"Is it {game.number}?")
    assert (last.reward, last.done) == (1.0, True)
