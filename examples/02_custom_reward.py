"""A reward function of your own, in a file of your own.

A reward function takes lists, one entry per completion, and returns one number each. It is called by keyword with what
it names: `completions`, `prompts`, `completion_ids`, `finished`, and any column of the data. In YAML:

    callbacks:
      - class_path: lightning_rlhf.callbacks.RolloutLoop
        init_args:
          rewards:
            - {function: "my_rewards.py:brief_and_right", weight: 1.0}

Functions written for TRL, verl or OpenRLHF work as they are; docs/rewards.md tells what is done when one fails.

Run this file to see how it is called, and what is said when it asks for a column that is not there:

    python examples/02_custom_reward.py
"""

from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction


def brief_and_right(completions: list[str], answer: list[str], finished: list[bool]) -> list[float | None]:
    """1 for the right answer, 0.1 less for each word too many; None (left out) where the response was cut."""
    rewards: list[float | None] = []
    for text, right, ended in zip(completions, answer, finished, strict=True):
        words = text.split()
        rewards.append(None if not ended else float(right in words) - 0.1 * max(len(words) - 1, 0))
    return rewards


def needs_a_hint(completions: list[str], answers: list[str]) -> list[float]:
    """Asks for `answers`; the data has `answer`."""
    return [0.0 for _ in completions]


def main() -> list[float]:
    """Call the one, and have the other refused."""
    columns = {"answer": ["42", "42", "42"]}
    reward = RewardFunction(brief_and_right)
    reward.check(columns)
    values = compute_reward(
        reward, completions=["42", "it is 42", "it"], finished=[True, True, False], **columns
    ).tolist()
    print("rewards:", [round(value, 2) for value in values])
    try:
        RewardFunction(needs_a_hint).check(columns)
    except ValueError as refusal:
        print("refused:", refusal)
    return values


if __name__ == "__main__":
    main()
