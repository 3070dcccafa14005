"""Completions of an engine are checked against the request; an invalid one ends the run with a message."""

from dataclasses import replace

import pytest

from lightning_rlhf.rollout.vllm.requests import as_completion
from lightning_rlhf.types import Completion
from tests.callbacks.conftest import exact
from tests.stand_ins import VOCABULARY, ScriptedEngine


class Faulty(ScriptedEngine):
    """Changes the first completion of each call."""

    def __init__(self, texts, tokenizer, change):
        super().__init__(texts, tokenizer)
        self.change = change

    def generate(self, prompts, sampling, seeds):
        completions = super().generate(prompts, sampling, seeds)
        completions[:1] = self.change(completions[0])
        return completions


def changed(**fields):
    return lambda completion: [replace(completion, **fields)]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed(policy_version=7),
            "the engine returned a completion of policy version 7, but the last pushed version is 0",
        ),
        (
            changed(token_ids=[3] * 300, logprobs=[-1.0] * 300),
            "the engine returned 300 tokens where at most 4 were requested",
        ),
        (
            changed(token_ids=[VOCABULARY], logprobs=[-1.0]),
            f"the engine returned token {VOCABULARY}; the actor has tokens 0 to {VOCABULARY - 1}",
        ),
        (changed(logprobs=[float("nan")] * 2), "the engine returned log-probabilities that are not finite"),
        (changed(logprobs=[float("-inf")] * 2), "the engine returned log-probabilities that are not finite"),
        (changed(token_ids=[-1], logprobs=[-1.0]), "the engine returned token -1; the actor has tokens 0 to"),
    ],
    ids=["version", "length", "token", "NaN", "minus infinity", "negative token"],
)
def test_invalid_completion_ends_the_run_before_the_update(run, change, message):
    made = run()
    made.loop.engine = Faulty(made.engine.texts, made.engine.tokenizer, change)
    with pytest.raises(RuntimeError, match=message):
        made.fit()
    assert made.trainer.global_step == 0


def test_missing_completion_ends_the_run(run):
    made = run()
    made.loop.engine = Faulty(made.engine.texts, made.engine.tokenizer, lambda completion: [])
    with pytest.raises(RuntimeError, match=r"the engine returned \d completions for \d prompts"):
        made.fit()


@pytest.mark.parametrize("value", [0.5, float("inf")])
def test_impossible_log_probability_raises(value):
    with pytest.raises(ValueError, match=rf"must not be positive, got {value} at token 1"):
        Completion([3, 4], [-1.0, value], "stop", 0)


def test_log_probability_slightly_above_zero_is_accepted():
    assert Completion([3], [1e-6], "stop", 0).logprobs == [1e-6]


def test_missing_field_in_a_vllm_answer_is_reported():
    with pytest.raises(RuntimeError, match="vLLM's completion lacks 'logprobs'; it has id, token_ids"):
        as_completion({"id": "0", "token_ids": [1]})


def test_plain_function_is_accepted_as_a_reward(run):
    assert "reward/exact" in run(loop={"rewards": [exact], "val_metric": "exact"}).fit().metrics
