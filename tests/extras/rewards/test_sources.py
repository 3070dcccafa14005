"""A separate function for each source of data receives its completions."""

import pytest

from lightning_rlhf.extras.rewards.sources import BySource
from lightning_rlhf.extras.rewards.text import ExactMatch
from lightning_rlhf.rewards.executor import RewardExecutor, compute_reward
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.rewards.rules import gsm8k_strict


def compute_score(solution_str, ground_truth, extra_info=None):
    return {"score": -1.0 if solution_str != ground_truth else 1.0, "length": len(solution_str)}


async def later(completions, level):
    return [None if number == 0 else float(number) for number in level]


SOURCES = ["openai/gsm8k", "wiki", "openai/gsm8k", "aime2024", "aime2025", "code"]
TEXTS = ["#### 1", "Bern", "#### 3", "4", "x", "y"]
TRUTHS = ["1", "bern", "2", "4", "5", "6"]


def test_each_completion_is_scored_by_the_function_of_its_source():
    reward = BySource({"openai/gsm8k": gsm8k_strict, "wiki": ExactMatch(), "aime*": compute_score, "*": later})
    result = compute_reward(
        RewardFunction(reward),
        completions=TEXTS,
        prompts=TEXTS,
        data_source=SOURCES,
        ground_truth=TRUTHS,
        level=[7] * 6,
    )
    assert result.tolist() == [1, 1, 0, 1, -1, 7]
    zero = compute_reward(
        RewardFunction(reward), completions=["a"], prompts=["a"], data_source=["x"], ground_truth=["a"], level=[0]
    )
    assert zero.isnan().all()


def test_functions_receive_the_trainer_state_and_can_log_numbers():
    def late(completions, trainer_state):
        return [float(trainer_state.global_step)] * len(completions)

    reward = RewardFunction(BySource({"a": late, "*": compute_score}), name="right")
    columns = {"data_source": ["b", "a", "b"], "ground_truth": ["x"] * 3, "prompts": ["p"] * 3}
    with RewardExecutor([reward]) as executor:
        result = executor.score({"completions": ["x", "y", "xyz"], **columns}, TrainerState(7))
    assert result.rewards["right"].tolist() == [1, 7, -1]
    assert result.metrics["reward_right/length"] == (4.0, 2.0)
    assert result.metrics["reward_right/not_applicable"] == (0.0, 3.0)


def test_first_matching_pattern_is_used():
    reward = BySource({"a*": ExactMatch(), "*": gsm8k_strict})
    assert reward(["x", "#### 1"], ["ab", "b"], ground_truth=["x", "1"]) == [1.0, 1.0]


def test_source_without_a_function_raises_an_error():
    with pytest.raises(ValueError, match=r"no reward function for data_source 'wiki'; patterns: \['openai/gsm8k'\]"):
        BySource({"openai/gsm8k": gsm8k_strict})(TEXTS, SOURCES, ground_truth=TRUTHS)


def test_data_without_sources_raise_an_error_before_the_run():
    with pytest.raises(ValueError, match="needs 'data_source'"):
        RewardFunction(BySource({"*": gsm8k_strict})).check(["ground_truth"])
    with pytest.raises(ValueError, match="at least one pattern"):
        BySource({})


def test_source_reward_is_per_sample_if_all_its_functions_are():
    assert BySource({"*": ExactMatch()}).per_sample
    assert not BySource({"a": ExactMatch(), "*": later}).per_sample
