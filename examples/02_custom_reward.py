"""A custom reward function in a separate file.

A reward function takes lists, one entry per completion, and returns one number each. It is called with the
arguments that it names: `completions`, `prompts`, `completion_ids`, `finished`, and any column of the data. In YAML:

    callbacks:
      - class_path: lightning_rlhf.callbacks.RolloutLoop
        init_args:
          rewards:
            - {function: "my_rewards.py:brief_and_right", weight: 1.0}

Functions written for TRL, verl or OpenRLHF work as they are; docs/rewards.md describes the policies for failures.

Run this file to see a call, and the error for a column that the data does not have:

    python examples/02_custom_reward.py
"""

from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction


def brief_and_right(completions: list[str], answer: list[str], finished: list[bool]) -> list[float | None]:
    """Score 1 for the correct answer, 0.1 less for each extra word, None (left out) for a truncated response."""
    rewards: list[float | None] = []
    for text, right, ended in zip(completions, answer, finished, strict=True):
        words = text.split()
        rewards.append(None if not ended else float(right in words) - 0.1 * max(len(words) - 1, 0))
    return rewards


def needs_a_hint(completions: list[str], answers: list[str]) -> list[float]:
    """Name the column `answers`, although the data has `answer`."""
    return [0.0 for _ in completions]


def main() -> list[float]:
    """Call the first function, and show the error of the second."""
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
