"""Reward functions receive the arguments they name, and errors name the function."""

import functools
import math

import numpy
import pytest
import torch

from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction, check_rewards

OFFERED = {
    "prompts": ["p", "q"],
    "completions": ["ab", "c"],
    "completion_ids": [[5, 6], [7]],
    "finished": [True, False],
    "answer": ["ab", "x"],
}


def length(completions):
    return [len(text) for text in completions]


def right(completions, answer, bonus=1.0):
    return [bonus * (text == gold) for text, gold in zip(completions, answer, strict=True)]


def giving(values):
    def function(completions):
        return values

    return RewardFunction(function)


def test_function_receives_the_arguments_it_names():
    assert compute_reward(RewardFunction(length), **OFFERED).tolist() == [2, 1]
    assert compute_reward(RewardFunction(right), **OFFERED).tolist() == [1, 0]
    assert compute_reward(RewardFunction(functools.partial(right, bonus=3.0), name="right"), **OFFERED).tolist() == [
        3,
        0,
    ]


def test_function_with_kwargs_receives_everything():
    seen = {}

    def function(completions, **rest):
        seen.update(rest, completions=completions)
        return [0, 0]

    compute_reward(RewardFunction(function), **OFFERED)
    assert {name: seen.pop(name) for name in OFFERED} == OFFERED
    assert sorted(seen) == ["log_extra", "log_metric", "trainer_state"]


def test_callable_object_is_a_reward_function():
    class Judge:
        def __call__(self, completions):
            return [0.5] * len(completions)

    reward = RewardFunction(Judge())
    assert reward.label == "Judge"
    assert compute_reward(reward, **OFFERED).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("lightning_rlhf.extras.rewards.text:Length", {"leas": 1}, "missing a required argument: 'least'"),
        ("lightning_rlhf.extras.rewards.text:ExactMatch", {"tags": "b"}, "got an unexpected keyword argument 'tags'"),
        (right, {"bonuses": 2.0}, "got an unexpected keyword argument 'bonuses'"),
    ],
)
def test_unknown_arguments_raise_an_error_at_construction(function, arguments, message):
    with pytest.raises(ValueError, match=rf"its arguments do not match its signature: {message}"):
        RewardFunction(function, arguments=arguments)


@pytest.mark.parametrize(
    "values",
    [[1, 0], (1.0, 0.0), [True, False], torch.tensor([1, 0]), numpy.array([1.0, 0.0]), list(numpy.float32([1, 0]))],
    ids=["int", "tuple", "bool", "tensor", "array", "numpy floats"],
)
def test_numbers_of_many_types_are_accepted(values):
    rewards = compute_reward(giving(values), **OFFERED)
    assert rewards.tolist() == [1, 0]
    assert rewards.dtype == torch.float32


def test_none_becomes_nan():
    first, second = compute_reward(giving([None, 0.5]), **OFFERED).tolist()
    assert math.isnan(first)
    assert second == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 value, expected a list of 2 numbers: one per completion"),
        ([1.0] * 3, "returned 3 values, expected a list of 2 numbers: one per completion"),
        (1.0, "returned float, expected a list of 2 numbers: one per completion"),
        (None, "returned NoneType, expected a list of 2 numbers: one per completion"),
        (torch.tensor(1.0), "returned float, expected a list of 2 numbers: one per completion"),
        ([0.0, math.nan], "returned nan for completion 1, expected a finite number, or None where it does not apply"),
        ([-math.inf, 0.0], "returned -inf for completion 0, expected a finite number"),
        (["1", 0.0], "returned '1' for completion 0, expected a finite number"),
        (torch.ones(2, 1), "returned [1.0] for completion 0, expected a finite number"),
    ],
)
def test_invalid_reward_names_function_and_completion(values, message):
    with pytest.raises(RuntimeError) as caught:
        compute_reward(giving(values), **OFFERED)
    assert str(caught.value).startswith(f"reward function 'function' {message}")


def test_exception_is_raised_with_the_function_s_name():
    def strict(completions):
        raise KeyError("level")

    with pytest.raises(RuntimeError, match="reward function 'strict' raised KeyError: 'level'") as caught:
        compute_reward(RewardFunction(strict), **OFFERED)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RuntimeError, match="reward function 'mine' raised"):
        compute_reward(RewardFunction(strict, name="mine"), **OFFERED)


def test_missing_column_comes_with_a_suggestion():
    with pytest.raises(ValueError, match=r"'right' needs 'answer', but .* 'answers'\]; did you mean 'answers'\?"):
        RewardFunction(right).check(["answers"])
    with pytest.raises(ValueError, match=r"'right' needs 'answer', but a rollout provides only .*'end_tokens'\]$"):
        RewardFunction(right).check([])


def test_defaults_and_kwargs_need_no_column():
    RewardFunction(right).check(["answer"])
    RewardFunction(lambda completions, *rest, **more: []).check([])


def test_two_functions_with_the_same_name_raise_an_error():
    with pytest.raises(ValueError, match="two reward functions have the name 'length': set another"):
        check_rewards([RewardFunction(length), RewardFunction(right), RewardFunction(length, weight=0.0)], ["answer"])
    check_rewards([RewardFunction(length), RewardFunction(length, name="length_again")], [])


def test_column_with_the_name_of_a_generated_one_raises_an_error():
    with pytest.raises(ValueError, match=r"the data has a column 'finished', .* rename it, for example columns: "):
        check_rewards([RewardFunction(length)], ["answer", "finished"])
    check_rewards([], ["finished"])


def test_all_functions_are_checked():
    with pytest.raises(ValueError, match="'right' needs 'answer'"):
        check_rewards([RewardFunction(length), RewardFunction(right)], [])


@pytest.mark.parametrize("name", ["mean", "std", "from_model", "score"])
def test_reward_cannot_have_the_name_of_a_metric(name):
    with pytest.raises(ValueError, match=f"cannot be called '{name}', which is the name of a metric"):
        check_rewards([RewardFunction(lambda completions: [0.0], name=name)], [])
