"""A guessing game: the policy finds a number in a few turns."""

import random
import re

from lightning_rlhf.environments import Environment, Reply


class Guessing(Environment):
    """Replies to each guess with "higher" or "lower"; the reward is 1 for the number."""

    def reset(self, row, seed):
        """Choose the number."""
        self.number = random.Random(seed).randint(1, row["largest"])

    def step(self, text):
        """Compare the last number of a turn with the number to find."""
        guesses = re.findall(r"\d+", text)
        if not guesses:
            return "Answer with a number."
        guess = int(guesses[-1])
        if guess == self.number:
            return Reply(reward=1.0, done=True)
        if guess < self.number:
            return "higher"
        return "lower"
