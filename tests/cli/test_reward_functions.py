"""Reward functions in a configuration: valid ones are logged, invalid ones are rejected before any model is loaded."""

import csv
from pathlib import Path

import pytest
import yaml

FILE = """
class Short:
    def __init__(self, bonus):
        self.bonus = bonus

    def __call__(self, completions):
        return [self.bonus - len(text) for text in completions]


def brief(completions, answer):
    return [-float(len(text)) for text in completions]


def compute_score(solution_str, ground_truth):
    return {"score": 1.0, "characters": len(solution_str)}


def of_messages(completions):
    return [float(len(completion[0]["content"])) for completion in completions]


def wrong_column(completions, answers):
    return [0.0 for _ in completions]


def faulty(completions):
    return [1.0 / len(text) for text in completions]
"""
SHAPING = "lightning_rlhf.rewards.shaping"


@pytest.fixture
def with_reward(config, tmp_path):
    """The configuration with a second reward, called ``mine``."""
    Path("my_rewards.py").write_text(FILE)

    def made(**reward):
        loop = config["trainer"]["callbacks"][0]["init_args"]
        loop["rewards"].append({"name": "mine", "weight": 0.0, **reward})
        config["trainer"]["max_steps"] = 1
        return config

    return made


def rows():
    with Path("runs/tiny/metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "reward",
    [
        {"function": "my_rewards.py:brief"},
        {"function": "my_rewards.brief"},
        {"function": "my_rewards.py:Short", "arguments": {"bonus": 2.0}},
        {"function": "my_rewards.py:compute_score", "timeout_s": 20.0, "on_error": "skip"},
        {"function": "my_rewards.py:of_messages", "messages": True},
        {"function": "my_rewards.py:brief", "per_sample": True},
        {"function": {"class_path": f"{SHAPING}.OverlongPenalty", "init_args": {"max_tokens": 4, "buffer_tokens": 2}}},
        {"function": f"{SHAPING}:OverlongPenalty", "arguments": {"max_tokens": 4, "buffer_tokens": 2}},
    ],
    ids=str,
)
def test_reward_can_be_given_in_many_ways_and_its_configuration_can_be_run_again(fit, with_reward, reward):
    assert fit(with_reward(**reward)).code == 0
    first = rows()[-1]
    assert float(first["reward/mine_std"]) >= 0
    assert float(first["reward_mine/not_applicable"]) == 0
    saved = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())
    assert fit(saved).code == 0
    assert rows()[-1]["reward/mine"] == first["reward/mine"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"function": "my_rewards.py:bref"}, "'bref' was not found in my_rewards.py; did you mean 'brief'?"),
        ({"function": "my_reward.py:brief"}, "file not found: my_reward.py; did you mean 'my_rewards.py'?"),
        (
            {"function": "her_rewards.brief"},
            "no module named 'her_rewards' (to import her_rewards); specify a function in a",
        ),
        ({"function": "my_rewards.py:wrong_column"}, "'mine' needs 'answers', but a rollout provides only"),
        ({"function": "my_rewards.py:of_messages"}, "'mine' raised TypeError: string indices must be integers"),
        (
            {"function": "my_rewards.py:faulty"},
            "'mine' raised ZeroDivisionError: float division by zero; it was called",
        ),
        (
            {"function": "my_rewards.py:brief", "on_error": "ignore"},
            "(RewardFunction): on_error must be one of 'raise', 'skip', 'zero', got 'ignore'",
        ),
    ],
    ids=lambda value: value["function"] if isinstance(value, dict) else "",
)
def test_invalid_reward_gives_a_one_line_error_before_any_model_is_loaded(
    fit, with_reward, monkeypatch, reward, message
):
    monkeypatch.setattr("lightning_rlhf.models.loading.FromConfig.causal", None)
    config = with_reward(**reward)
    config["trainer"]["callbacks"][0]["init_args"]["max_response_tokens"] = 40  # as long as the correct answers
    result = fit(config)
    *trace, line = result.err.splitlines()
    assert (result.code, result.out, result.warned) == (2, "", [])
    assert message in line
    assert bool(trace) == ("raised" in message)
    assert any("my_rewards.py" in line for line in trace) or not trace  # the author's own lines, and none of ours
    assert not any("lightning_rlhf/" in line for line in trace)
