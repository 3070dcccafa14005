"""Scoring during generation returns the same rewards and takes no extra time."""

import random
import time
from pathlib import Path

import pytest
import torch

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.rollout.source import assemble
from lightning_rlhf.types import Completion
from tests.stand_ins import prompt_batch

FILE = Path(__file__).with_name("streamed.py")
TOKENIZER = CharacterTokenizer("abcdefg").load()
BATCH = prompt_batch([0, 1, 2], [[4], [5, 6], [7]], ["a", "bc", "d"], {"ground_truth": ["ab", "c", "g"]})
WORDS = ["ab", "c", "", "gggg", "abc", "f", "de", "a", "c", "gf", "fg", "b"]
# Functions of streamed.py, with their options.
FUNCTIONS = {"of_all": {}, "one_by_one": {}, "timed": {"timeout_s": 30.0}, "several": {}, "awaited": {}}
SAMPLES = 4
END = 2  # end token of TOKENIZER


def completions_of(words):
    completions = []
    for word in words:
        ids = [*TOKENIZER(word)["input_ids"], END]
        finish_reason = "length" if word == "de" else "stop"  # one is truncated, which the function several returns
        completions.append(Completion(ids, [-0.5] * len(ids), finish_reason, 0))
    return completions


@pytest.fixture(scope="module")
def executor():
    with RewardExecutor(
        [RewardFunction(f"{FILE}:{name}", **options) for name, options in FUNCTIONS.items()]
    ) as executor:
        yield executor


def rollout_of(executor, early):
    """Return the rollout of all words and its scores; those at positions ``early`` are added one by one before."""
    completions = completions_of(WORDS)
    scorer = Scorer(BATCH, executor, TOKENIZER, SAMPLES)
    for position in early:
        scorer.add(position, completions[position])
    scored = scorer.score(completions)
    return scorer.add_rewards(assemble(BATCH, completions), scored), scored


def test_rollout_does_not_depend_on_the_order_of_completions(executor):
    whole, whole_scores = rollout_of(executor, [])
    assert whole.rewards["of_all"].tolist() == [float(sorted(WORDS).index(word)) for word in WORDS]
    assert whole.rewards["one_by_one"].tolist() == [float(len(word)) for word in WORDS]
    assert whole.rewards["timed"].isnan().tolist() == [word == "" for word in WORDS]  # it returns None for these
    draw = random.Random(3)
    for count in (0, 1, 7, 12, 12, 12):  # three different orders of all
        rollout, scores = rollout_of(executor, draw.sample(range(12), count))
        for name, tensor in vars(whole).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor, getattr(rollout, name)), name
        for name, values in whole.rewards.items():
            assert torch.equal(values.nan_to_num(-9), rollout.rewards[name].nan_to_num(-9)), name
        assert scores.metrics == whole_scores.metrics


def test_each_completion_is_scored_once_in_order():
    calls = []

    def counted(solution_str):
        calls.append(solution_str)
        return 1.0

    with RewardExecutor([RewardFunction(counted)]) as executor:
        rollout_of(executor, range(5))
    assert calls == WORDS


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"timeout_s": 20.0}, {"per_sample": True}, {}], ids=["time limit", "per sample", "default"]
)
def test_slow_function_runs_during_generation(options):
    with RewardExecutor([RewardFunction(f"{FILE}:slow", **options)]) as executor:
        rollout_of(executor, range(2))  # starts the worker processes, so that their start is not measured
        completions, began = completions_of(WORDS), time.monotonic()
        scorer = Scorer(BATCH, executor, TOKENIZER, SAMPLES)
        for position, completion in enumerate(completions):  # 12 completions in 6 s, 4.8 s of judging
            time.sleep(0.5)
            scorer.add(position, completion)
        generated = time.monotonic()
        rollout = scorer.add_rewards(assemble(BATCH, completions), scorer.score(completions))
        waited = time.monotonic() - generated
    assert rollout.reward.tolist() == [1] * 12
    assert generated - began < 7
    assert waited < 1.5  # only the last completion was still to be judged


def test_functions_of_a_whole_rollout_are_called_once_at_its_end():
    calls = []

    def whole(completions):
        calls.append(len(completions))
        return [0.0] * len(completions)

    with RewardExecutor([RewardFunction(whole)]) as executor:
        assert not executor.has_streaming
        rollout_of(executor, range(12))
    assert calls == [12]
