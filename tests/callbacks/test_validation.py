"""Validation: the numbers by hand, and when they are taken."""

import math
from itertools import combinations, product

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf.callbacks.validation import Validation
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.rewards.adapter import RewardFunction
from lightning_rlhf.types import Completion, PromptBatch
from tests.callbacks.conftest import ROWS, exact
from tests.stand_ins import Response, TinyModel, rollout_of


def alone(value):
    return value


def judged(rewards, lengths=None, truncated=None):
    """One batch of two prompts with one greedy and four sampled responses each."""
    lengths, truncated = lengths or [1] * 10, truncated or [False] * 10
    rows = [
        Response([4], [5] * length, reward, truncated=cut)
        for reward, length, cut in zip(rewards, lengths, truncated, strict=True)
    ]
    return PromptBatch([0, 1], [[4], [4]], ["a", "a"], {"answer": ["x", "y"]}), rollout_of(rows)


REWARDS = [1, 0, 1, 0, 0, 0, 1, 1, 0, 1]  # greedy first: prompt 0 has 1 of 4 samples right, prompt 1 has 3


@pytest.fixture
def measured(tokenizer):
    validation = Validation("given", 4)
    validation.add(*judged(REWARDS, [9, 1, 2, 3, 4, 9, 1, 1, 1, 3], [True, *[False] * 8, True]), tokenizer)
    return validation


def test_means_of_greedy_and_sampled_responses(measured):
    found = measured.metrics(alone)
    assert found["val/greedy"] == found["val/given_greedy"] == 0.5
    assert found["val/sampled"] == found["val/given_sampled"] == 0.5
    assert found["val/response_tokens_mean"] == 2.0  # of the sampled ones
    assert found["val/truncated_fraction"] == 1 / 8


def test_pass_at_k_is_unbiased(measured):
    found = measured.metrics(alone)
    # n = 4. c = 1: pass@2 = 1 - C(3,2)/C(4,2) = 1/2. c = 3: C(1,2) = 0, so 1.
    assert found["val/pass@2"] == pytest.approx(0.75)
    assert found["val/pass@4"] == 1.0
    assert not {"val/pass@1", "val/pass@3", "val/pass@8"} & set(found)


def test_pass_at_k_of_a_whole_run_of_batches_and_its_expectation(tokenizer):
    """The mean over all ways to draw 2 of 4 samples is the estimate."""
    for outcome in product([0, 1], repeat=4):
        validation = Validation("given", 4)
        validation.add(*judged([0, *outcome, 0, *outcome]), tokenizer)
        direct = [max(pair) for pair in combinations(outcome, 2)]
        assert validation.metrics(alone)["val/pass@2"] == pytest.approx(sum(direct) / len(direct))


def test_scores_of_right_samples_should_be_higher(measured):
    #                                 right                        wrong: 0.1 0.9 0.9 0.3 / right: 0.5 | 0.8 0.9 0.2
    measured.add_scores(torch.tensor([9, 0.1, 0.5, 0.9, 0.9, -9, 0.8, 0.9, 0.3, 0.2]))
    found = measured.metrics(alone)
    # wins over (0.1, 0.9, 0.9, 0.3): 0.5 -> 2, 0.8 -> 2, 0.9 -> 2 and two ties, 0.2 -> 1
    assert found["val/score_orders_right_first"] == pytest.approx((2 + 2 + 3 + 1) / 16)
    assert found["val/score_greedy"] == 0.0
    assert found["val/score_sampled"] == pytest.approx((0.1 + 0.5 + 0.9 + 0.9 + 0.8 + 0.9 + 0.3 + 0.2) / 8)


@pytest.mark.parametrize("reward", [0, 1])
def test_an_order_without_right_or_without_wrong_is_not_a_number(tokenizer, reward):
    validation = Validation("given", 4)
    validation.add(*judged([reward] * 10), tokenizer)
    validation.add_scores(torch.arange(10.0))
    assert math.isnan(validation.metrics(alone)["val/score_orders_right_first"])


def test_a_reward_that_does_not_apply_counts_nowhere(tokenizer):
    validation = Validation("given", 4)
    validation.add(*judged([1, math.nan, 1, math.nan, math.nan, 1, 1, 1, 1, 1]), tokenizer)
    found = validation.metrics(alone)
    assert found["val/given_sampled"] == 1.0  # of five
    assert found["val/sampled"] == 1.0
    assert found["val/pass@2"] == 1.0  # of the prompt whose samples were all judged


def test_without_reward_functions_only_lengths_and_scores_are_known(tokenizer):
    batch, rollout = judged(REWARDS)
    validation = Validation(None, 4)
    validation.add(batch, type(rollout)(**{**vars(rollout), "rewards": {}}), tokenizer)
    validation.add_scores(torch.zeros(10))
    assert set(validation.metrics(alone)) == {
        "val/response_tokens_mean", "val/truncated_fraction", "val/score_greedy", "val/score_sampled",
    }  # fmt: skip


def test_where_no_reward_says_what_is_correct_each_one_s_own_means_are_all_that_is_told(tokenizer):
    validation = Validation(None, 4)
    validation.add(*judged([2.5 * reward for reward in REWARDS]), tokenizer)
    validation.add_scores(torch.arange(10.0))
    found = validation.metrics(alone)
    assert set(found) == {
        "val/given_greedy", "val/given_sampled", "val/response_tokens_mean", "val/truncated_fraction",
        "val/score_greedy", "val/score_sampled",
    }  # fmt: skip
    assert found["val/given_greedy"] == found["val/given_sampled"] == 1.25


def test_greedy_responses_are_kept_with_rewards_and_columns(measured):
    assert measured.samples == [
        {"prompt": "a", "response": "b" * 9, "given": 1.0, "answer": "x"},
        {"prompt": "a", "response": "b" * 9, "given": 0.0, "answer": "y"},
    ]


def test_no_more_than_64_are_kept(tokenizer):
    validation = Validation("given", 4)
    for _ in range(40):
        validation.add(*judged(REWARDS), tokenizer)
    assert len(validation.samples) == 64


# -- under a Trainer ---------------------------------------------------------------------------------------------------


class Diary(Callback):
    """The step of every validation and its metrics."""

    def __init__(self):
        self.entries = []

    def on_validation_end(self, trainer, pl_module):
        self.entries.append((trainer.global_step, {k: float(v) for k, v in trainer.callback_metrics.items()}))

    @property
    def steps(self):
        return [step for step, _ in self.entries]


@pytest.mark.parametrize(
    ("loop", "trainer", "steps"),
    [
        ({}, {"val_check_interval": 1.0}, [0, 2]),  # the one at the end of the epoch is not repeated
        ({}, {"val_check_interval": 1}, [0, 1, 2]),
        ({}, {"max_steps": 3, "max_epochs": 9, "check_val_every_n_epoch": 9}, [0, 3]),
        ({"validate_at_ends": False}, {"val_check_interval": 2}, [2]),
        ({}, {"num_sanity_val_steps": 1}, [0, 2]),
        ({}, {"fast_dev_run": 1}, [1]),
    ],
)
def test_validation_before_and_after_training_and_in_between(run, loop, trainer, steps):
    diary = Diary()
    run(loop=loop, trainer=trainer, data={"val": InMemory(ROWS)}, callbacks=[diary]).fit()
    assert diary.steps == steps


def test_without_validation_data_nothing_is_asked(run):
    diary = Diary()
    made = run(callbacks=[diary]).fit()
    assert diary.entries == []
    assert [call for call in made.engine.calls if call.startswith("generate")] == ["generate 2", "generate 2"]


# An engine's answers: greedily right to a and bb; of two samples right to a: one, bb: none, ccc: both, d: one.
GREEDY = {"a": "a", "bb": "b", "ccc": "d", "d": "a"}
SAMPLED = {"a": "ab", "bb": "ac", "ccc": "cc", "d": "da"}
RIGHT = {row["prompt"]: row["answer"] for row in ROWS}


def test_metrics_under_a_trainer_are_those_computed_by_hand(run, monkeypatch):
    diary = Diary()
    made = run(
        loop={"val_samples": 2},
        data={"val": InMemory(ROWS), "val_batch_size": 3},
        model={"reward_model": TinyModel(seed=5)},
        callbacks=[diary],
    )
    encode = {letter: 4 + i for i, letter in enumerate("abcdefg")}
    texts = {tuple(encode[letter] for letter in row["prompt"]): row["prompt"] for row in ROWS}

    def generate(prompts, sampling, seeds):
        said, number = [], {}
        for ids in prompts:
            prompt = texts[tuple(ids)]
            number[prompt] = number.get(prompt, -1) + 1
            word = GREEDY[prompt] if sampling.temperature == 0 else SAMPLED[prompt][number[prompt] % 2]
            said.append(Completion([encode[word], 2], [-1.0, -1.0], "stop", 0))
        return said

    monkeypatch.setattr(made.engine, "generate", generate)
    made.fit()
    found = diary.entries[0][1]
    assert found["val/greedy"] == 0.5
    assert found["val/sampled"] == (1 + 0 + 2 + 1) / 8
    assert found["val/pass@2"] == 3 / 4
    assert found["val/response_tokens_mean"] == 2.0
    assert made.loop.validation_samples[2] == {"prompt": "ccc", "response": "d", "exact": 0.0, "answer": "c"}

    scorer = TinyModel(seed=5).scalar()

    def score(prompt, word):
        ids = torch.tensor([[*(encode[letter] for letter in prompt), encode[word], 2]])
        return scorer(ids, torch.tensor([[ids.shape[1] - 1]])).item()

    with torch.no_grad():
        marks = {(p, w): score(p, w) for p, words in SAMPLED.items() for w in words}
    pairs = [(p, w) for p, words in SAMPLED.items() for w in words]
    right = [marks[p, w] for p, w in pairs if RIGHT[p] == w]
    wrong = [marks[p, w] for p, w in pairs if RIGHT[p] != w]
    wins = [float(a > b) + float(a == b) / 2 for a in right for b in wrong]
    assert found["val/score_orders_right_first"] == pytest.approx(sum(wins) / len(wins))
    assert found["val/score_sampled"] == pytest.approx(sum(marks[pair] for pair in pairs) / 8, abs=1e-5)


def test_without_a_metric_a_run_logs_what_the_rewards_gave_and_no_share_of_right_answers(run):
    made = run(loop={"val_metric": None}, data={"val": InMemory(ROWS)}).fit()
    assert made.metrics["val/exact_greedy"] > 0
    assert not {"val/greedy", "val/sampled"} & set(made.metrics)


def test_the_metric_can_be_chosen(run):
    def never(completions):
        return [0.0] * len(completions)

    rewards = [RewardFunction(never), RewardFunction(exact, weight=0.0)]
    made = run(loop={"rewards": rewards, "val_metric": "exact"}, data={"val": InMemory(ROWS)}).fit()
    assert made.metrics["val/greedy"] == made.metrics["val/exact_greedy"] > 0
    assert made.metrics["val/never_greedy"] == 0
