"""Completions become a rollout: every number has its position, and every reward belongs to its response."""

import math

import pytest
import torch

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.rewards.function import CALL_ARGUMENTS, RewardFunction
from lightning_rlhf.rollout.assemble import scored_rollout
from lightning_rlhf.rollout.scorer import weighted_sum
from lightning_rlhf.types import Completion
from tests.helpers import assert_close
from tests.stand_ins import prompt_batch

TOKENIZER = CharacterTokenizer("abcdefg").load()
BATCH = prompt_batch([10, 11], [[4], [5, 6]], ["a", "bc"], {"gold": ["x", "y"]})


def completion(tokens, reason="stop", version=3):
    return Completion(tokens, [-0.5 * token for token in tokens], reason, version)


COMPLETIONS = [
    completion([7, 8, 2]),
    completion([9], "length"),
    completion([2]),
    completion([10, 10, 10, 10], "length", 4),
]


def position(completions):
    return list(range(len(completions)))


def test_two_responses_to_each_of_two_prompts_are_collected():
    rollout = scored_rollout(BATCH, COMPLETIONS, [RewardFunction(position)], TOKENIZER, temperature=0.7)
    assert rollout.prompt_ids.tolist() == [[4, 0], [4, 0], [5, 6], [5, 6]]
    assert rollout.prompt_lengths.tolist() == [1, 1, 2, 2]
    assert rollout.response_ids.tolist() == [[7, 8, 2, 0], [9, 0, 0, 0], [2, 0, 0, 0], [10, 10, 10, 10]]
    assert rollout.response_lengths.tolist() == rollout.response_mask.sum(1).tolist() == [3, 1, 1, 4]
    assert_close(
        rollout.rollout_logprobs,
        torch.tensor([[-3.5, -4, -1, 0], [-4.5, 0, 0, 0], [-1, 0, 0, 0], [-5, -5, -5, -5]]),
    )
    assert rollout.rewards["position"].tolist() == rollout.reward.tolist() == [0, 1, 2, 3]
    assert rollout.group.tolist() == [0, 0, 1, 1]
    assert rollout.truncated.tolist() == [False, True, False, True]
    assert rollout.policy_version.tolist() == [[3, 3, 3, 0], [3, 0, 0, 0], [3, 0, 0, 0], [4, 4, 4, 4]]
    assert rollout.temperature == 0.7


def test_messages_column_does_not_replace_the_messages_of_the_prompt():
    seen = []

    def spy(prompts, completions):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    output = [[{"role": "user", "content": prompt.text}] for prompt in BATCH]
    batch = prompt_batch([10, 11], [[4], [5, 6]], ["a", "bc"], {"messages": [["x"], ["y"]]}, messages=output)
    scored_rollout(batch, COMPLETIONS[:2], [RewardFunction(spy, messages=True)], TOKENIZER)
    assert seen == output


def test_functions_receive_text_without_special_tokens_and_repeated_columns():
    seen = {}

    def spy(**options):
        seen.update(options)
        return [0.0] * 4

    scored_rollout(BATCH, COMPLETIONS, [RewardFunction(spy)], TOKENIZER)
    assert {name: seen[name] for name in seen if name not in CALL_ARGUMENTS} == {
        "prompts": ["a", "a", "bc", "bc"],
        "completions": ["de", "f", "", "gggg"],
        "end_tokens": ["</s>", "", "</s>", ""],
        "completion_ids": [[7, 8, 2], [9], [2], [10, 10, 10, 10]],
        "finished": [True, False, True, False],
        "gold": ["x", "x", "y", "y"],
    }


def test_reward_is_the_weighted_sum_of_applicable_rewards():
    half = RewardFunction(lambda completions: [1, None, 1, None], weight=0.5, name="half")
    logged = RewardFunction(lambda completions: [9, 9, 9, 9], weight=0.0, name="logged")
    rollout = scored_rollout(BATCH, COMPLETIONS, [RewardFunction(position, weight=2.0), half, logged], TOKENIZER)
    assert rollout.reward.tolist() == [0.5, 2, 4.5, 6]
    assert rollout.rewards["logged"].tolist() == [9] * 4
    assert rollout.rewards["half"].isnan().tolist() == [False, True, False, True]


def test_reward_is_zero_without_functions():
    assert scored_rollout(BATCH, COMPLETIONS, [], TOKENIZER).reward.tolist() == [0] * 4


@pytest.mark.parametrize("count", [0, 1, 3])
def test_completions_that_do_not_divide_among_the_prompts_are_rejected(count):
    with pytest.raises(ValueError, match=f"got {count} completions for 2 prompts"):
        scored_rollout(BATCH, COMPLETIONS[:count], [], TOKENIZER)


def test_failing_function_is_reported_by_name():
    with pytest.raises(RuntimeError, match="reward function 'short' returned 1 value, expected a list of 4 numbers"):
        scored_rollout(BATCH, COMPLETIONS, [RewardFunction(lambda completions: [1.0], name="short")], TOKENIZER)


def test_weighted_sum_of_known_values():
    terms = [(2.0, torch.tensor([1.0, math.nan])), (-1.0, torch.tensor([0.5, 0.25]))]
    assert_close(weighted_sum(terms, 2), torch.tensor([1.5, -0.25]))
    assert weighted_sum([], 2).tolist() == [0, 0]
