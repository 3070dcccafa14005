"""A guessing game: a number from 1 to 31 is found with at most five guesses, each answered by ``<``, ``>`` or ``=``.

Halving the range finds every number. Without the answers, five guesses find 5 of 31 numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_rlhf.data.row import Row
from lightning_rlhf.environments.protocol import Environment, Reply
from lightning_rlhf.functional.seeding import derive_seed

CHARACTERS = "0123456789?<>="
_LARGEST = 31
_EXCLUDED = -0.2
GUESSES = 5


class Guessing(Environment):
    """Answers guesses. The reward is 1 for the number, and -0.2 for a guess that earlier answers exclude."""

    def reset(self, seed: int) -> None:
        """Choose the number."""
        self.number = 1 + seed % _LARGEST
        self.low, self.high = 1, _LARGEST

    def step(self, text: str) -> Reply:
        """Compare a guess with the number; a text that is not a number ends the game."""
        if not text.isdecimal():
            return Reply(reward=_EXCLUDED, done=True, metrics={"found": 0.0})
        guess = int(text)
        if guess == self.number:
            return Reply(reward=1.0, done=True, metrics={"found": 1.0})
        reward = 0.0 if self.low <= guess <= self.high else _EXCLUDED
        if self.number < guess:
            self.high = min(self.high, guess - 1)
        else:
            self.low = max(self.low, guess + 1)
        return Reply("<" if self.number < guess else ">", reward=reward, metrics={"found": 0.0})


@dataclass(frozen=True)
class Games:
    """Prompts of games, all the same; column ``prompt``.

    Args:
        num_rows: number of rows.
    """

    num_rows: int

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number in range(self.num_rows):
            yield f"game {number}", {"prompt": [{"role": "user", "content": "?"}]}


@dataclass(frozen=True)
class Demonstrations:
    """Games of a player who guesses at random among the numbers that are possible; column ``messages``.

    Args:
        num_rows: number of rows.
        seed: seed of the games.
        forgets: probability that a guess ignores all answers, in [0, 1].
    """

    num_rows: int
    seed: int = 0
    forgets: float = 0.2

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows with their locations."""
        for number in range(self.num_rows):
            draw = random.Random(derive_seed("guessing", self.seed, number))
            secret = draw.randint(1, _LARGEST)
            low, high = 1, _LARGEST
            messages = [{"role": "user", "content": "?"}]
            for turn in range(GUESSES):
                if draw.random() < self.forgets:
                    guess = draw.randint(1, _LARGEST)
                else:
                    guess = draw.randint(low, high)
                messages.append({"role": "assistant", "content": str(guess)})
                if guess == secret or turn == GUESSES - 1:
                    break
                messages.append({"role": "user", "content": "<" if secret < guess else ">"})
                if secret < guess:
                    low, high = (low, min(high, guess - 1))
                else:
                    low, high = (max(low, guess + 1), high)
            yield f"game {number}", {"messages": messages}


def is_found(environment_rewards: list[float], stop_reasons: list[str]) -> list[float]:
    """Return 1 for a game in which the number was found, else 0."""
    pairs = zip(environment_rewards, stop_reasons, strict=True)
    return [float(reward > 1 + GUESSES * _EXCLUDED and stop == "done") for reward, stop in pairs]
