"""Validation: metrics computed by hand, and the steps at which it runs."""

import logging
import math
import random
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.callbacks.loop.rollout_validation import RolloutValidation
from lightning_rlhf.callbacks.loop.validation import Validation, sources_in
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.functional.data_ranks import ONE_RANK
from lightning_rlhf.functional.samples import draw_sizes, wilson_interval
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.types import Completion
from tests.callbacks.conftest import ROWS, exact
from tests.helpers import assert_close, golden, normal, over_ranks
from tests.stand_ins import Response, TinyModel, prompt_batch, rollout_of


def alone(value):
    return value


def judged(rewards, lengths=None, truncated=None):
    """Return one batch of two prompts with one greedy and four sampled responses each."""
    lengths, truncated = lengths or [1] * 10, truncated or [False] * 10
    rows = [
        Response([4], [5] * length, reward, truncated=cut)
        for reward, length, cut in zip(rewards, lengths, truncated, strict=True)
    ]
    return prompt_batch([0, 1], [[4], [4]], ["a", "a"], {"answer": ["x", "y"]}), rollout_of(rows)


def of_one(reward):
    """Return the names of the metrics that are logged for a reward with four samples."""
    kinds = ["greedy", "sampled", "sampled_std", "best@2", "best@4", "worst@2", "worst@4"]
    kinds += [f"{name}_{bound}" for name in ("greedy", "sampled") for bound in ("low", "high")]
    return {f"val/{reward}_{kind}" for kind in kinds}


REWARDS = [1, 0, 1, 0, 0, 0, 1, 1, 0, 1]  # greedy first: prompt 0 has 1 of 4 samples right, prompt 1 has 3


@pytest.fixture
def measured(tokenizer):
    validation = Validation(4, ["given"], "given")
    validation.add(*judged(REWARDS, [9, 1, 2, 3, 4, 9, 1, 1, 1, 3], [True, *[False] * 8, True]), tokenizer)
    return validation


def test_means_of_greedy_and_sampled_responses(measured):
    result = measured.metrics(ONE_RANK)
    assert result["val/fraction_correct_greedy"] == result["val/given_greedy"] == 0.5
    assert result["val/given_sampled_std"] == pytest.approx(3**0.5 / 4)  # of 0 1 0 0 and of 1 1 0 1
    assert result["val/fraction_correct_sampled"] == result["val/given_sampled"] == 0.5
    assert result["val/response_tokens_mean"] == 2.0  # of the sampled ones
    assert result["val/truncated_fraction"] == 1 / 8


def test_shares_of_correct_responses_have_confidence_intervals(measured):
    result = measured.metrics(ONE_RANK)
    # greedy: 1 of 2 prompts; sampled: 1/4 and 3/4, s^2 / m = (1/4)^2 / 2: p (1 - p) / that is 8 trials, of 8 samples
    for name, interval in (("greedy", wilson_interval(1, 2)), ("sampled", wilson_interval(4, 8))):
        assert (
            result[f"val/fraction_correct_{name}_low"],
            result[f"val/fraction_correct_{name}_high"],
        ) == pytest.approx(interval)


def test_graded_rewards_have_confidence_intervals(tokenizer):
    validation = Validation(4, ["given"])
    validation.add(*judged([3.0, 1.0, 2.0, 3.0, 2.0, 5.0, 6.0, 5.0, 7.0, 6.0]), tokenizer)
    result = validation.metrics(ONE_RANK)
    # the prompts' means are 2 and 6: s^2 = 8, s / sqrt(m) = 2
    assert result["val/given_sampled"] == 4.0
    bounds = (result["val/given_sampled_low"], result["val/given_sampled_high"])
    assert bounds == pytest.approx((4 - 1.959964 * 2, 4 + 1.959964 * 2), abs=1e-5)
    one = Validation(4, ["given"])
    batch, rollout = judged([3.0, 1.0, 2.0, 3.0, 2.0] * 2)
    one.add(batch[:1], rollout[list(range(5))], tokenizer)
    assert math.isnan(one.metrics(ONE_RANK)["val/given_sampled_low"])  # one prompt has no variance


def test_confidence_intervals_are_over_the_prompts_of_all_ranks(tokenizer):
    batch, rollout = judged(REWARDS)

    def rank(number, ranks):
        validation = Validation(4, ["given"], "given")
        validation.add(batch[number : number + 1], rollout[list(range(5 * number, 5 * number + 5))], tokenizer)
        return validation.metrics(ranks)

    for result in over_ranks(*(partial(rank, number) for number in (0, 1))):
        assert (
            result["val/fraction_correct_sampled_low"],
            result["val/fraction_correct_sampled_high"],
        ) == pytest.approx(wilson_interval(4, 8))


# Samples: the prompts' means rise from 1/4 and 3/4 to 3/4 and 1, so the changes are 1/2 and 1/4, s / sqrt(m) is 1/8.
# Greedy responses: the changes are 0 and 1, and s / sqrt(m) is 1/2.
LATER = [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
CHANGES = {"greedy": (0.5, 0.5 - 1.959964 / 2, 1.0)}  # cut at 1
CHANGES["sampled"] = (0.375, 0.375 - 1.959964 / 8, 0.375 + 1.959964 / 8)


def changes_in(metrics, reward):
    ends = ("change", "change_low", "change_high")
    return {kind: tuple(metrics[f"val/{reward}_{kind}_{end}"] for end in ends) for kind in ("greedy", "sampled")}


def test_changes_since_the_first_validation_are_of_the_same_prompts(measured, tokenizer):
    first = measured.table(ONE_RANK)
    later = Validation(4, ["given"], "given")
    batch, rollout = judged(LATER)
    later.add(batch[::-1], rollout[[5, 6, 7, 8, 9, 0, 1, 2, 3, 4]], tokenizer)  # in another order
    result = later.metrics(ONE_RANK, first)
    for reward in ("fraction_correct", "given"):
        assert changes_in(result, reward) == {kind: pytest.approx(values) for kind, values in CHANGES.items()}
    assert {name for name in later.metrics(ONE_RANK) if "change" in name} == set()


def test_columns_of_the_table_are_named_in_their_order(measured):
    of_reward = ["given_greedy", *(f"given_sampled {number}" for number in range(4))]
    of_correctness = ["fraction_correct_greedy", *(f"fraction_correct_sampled {number}" for number in range(4))]
    assert measured.columns == ["source", "index", *of_correctness, *of_reward]
    assert measured.table(ONE_RANK).shape[1] == len(measured.columns)


def test_first_validation_is_compared_only_if_it_had_the_same_rewards(measured):
    callback = RolloutValidation(None, None, None)
    callback.validation, first = measured, measured.table(ONE_RANK)
    for columns, is_compared in (
        (measured.columns, True),
        (None, True),  # a checkpoint of an earlier version
        ([name.replace("given", "other") for name in measured.columns], False),
    ):
        callback.load_state_dict({"first": first, "columns": columns})
        assert (callback._comparable() is not None) is is_compared
    callback.load_state_dict({"first": first[:, 1:], "columns": None})
    assert callback._comparable() is None


def test_changes_of_a_source_are_of_its_prompts(tokenizer):
    def of(values):
        validation = Validation(1, ["given"], "given", sources=["a", "b"])
        rollout = rollout_of([Response([3], [4], value) for value in values for _ in range(2)])
        batch = prompt_batch(list(range(4)), [[3]] * 4, ["x"] * 4, {"source": ["a", "a", "b", "b"]})
        validation.add(batch, rollout, tokenizer)
        return validation

    first = of([0, 0, 1, 1]).table(ONE_RANK)
    result = of([1, 1, 1, 0]).metrics(ONE_RANK, first)
    assert result["val/given_greedy_change"] == 0.25
    assert result["val/a/given_greedy_change"] == 1.0
    assert result["val/b/given_greedy_change"] == -0.5


def test_changes_are_over_the_prompts_of_all_ranks(measured, tokenizer):
    first, (batch, rollout) = measured.table(ONE_RANK), judged(LATER)

    def rank(number, ranks):
        validation = Validation(4, ["given"], "given")
        validation.add(batch[number : number + 1], rollout[list(range(5 * number, 5 * number + 5))], tokenizer)
        return validation.metrics(ranks, first)

    for result in over_ranks(*(partial(rank, number) for number in (0, 1))):
        assert changes_in(result, "given") == {kind: pytest.approx(values) for kind, values in CHANGES.items()}


def test_changes_leave_out_prompts_without_a_value(measured, tokenizer):
    first = measured.table(ONE_RANK)
    later = Validation(4, ["given"], "given")
    later.add(*judged([math.nan, *LATER[1:5], 1, *[math.nan] * 4]), tokenizer)
    result = later.metrics(ONE_RANK, first)
    assert result["val/given_greedy_change"] == 1.0  # of the second prompt only
    assert result["val/given_sampled_change"] == 0.5  # of the first
    assert math.isnan(result["val/given_greedy_change_low"])
    other = Validation(3, ["given"], "given").metrics(ONE_RANK, first)  # another number of samples
    assert not any("change" in name for name in other)


def test_interval_needs_the_correctness_of_some_response(tokenizer):
    validation = Validation(4, ["given"], "given")
    validation.add(*judged([math.nan] * 10), tokenizer)
    assert math.isnan(validation.metrics(ONE_RANK)["val/fraction_correct_greedy_low"])


def test_pass_at_k_is_unbiased(measured):
    result = measured.metrics(ONE_RANK)
    # n = 4. c = 1: pass@2 = 1 - C(3,2)/C(4,2) = 1/2. c = 3: C(1,2) = 0, so 1.
    assert result["val/pass@2"] == pytest.approx(0.75)
    assert result["val/pass@4"] == 1.0
    assert result["val/pass@1"] == result["val/fraction_correct_sampled"] == 0.5
    assert not {"val/pass@3", "val/pass@8", "val/given_best@1", "val/given_worst@1"} & set(result)
    for k in (2, 4):
        assert result[f"val/given_best@{k}"] == pytest.approx(result[f"val/pass@{k}"])
    # the worst of two: of 0 1 0 0 never 1, of 1 1 0 1 in C(3,2) of C(4,2) draws
    assert result["val/given_worst@2"] == pytest.approx(0.25)
    assert result["val/given_worst@4"] == 0.0


def test_pass_at_k_of_a_whole_run_of_batches_equals_its_expectation(tokenizer):
    """The mean over all ways to draw 2 of 4 samples is the estimate."""
    for outcome in product([0, 1], repeat=4):
        validation = Validation(4, ["given"], "given")
        validation.add(*judged([0, *outcome, 0, *outcome]), tokenizer)
        direct = [max(pair) for pair in combinations(outcome, 2)]
        assert validation.metrics(ONE_RANK)["val/pass@2"] == pytest.approx(sum(direct) / len(direct))


def test_score_order_is_the_share_of_pairs_whose_right_sample_scores_higher(tokenizer):
    measured = Validation(4, ["given"], "given", scored=True)
    measured.add(*judged(REWARDS), tokenizer)
    #                                 right                        wrong: 0.1 0.9 0.9 0.3 / right: 0.5 | 0.8 0.9 0.2
    measured.add_scores(torch.tensor([9, 0.1, 0.5, 0.9, 0.9, -9, 0.8, 0.9, 0.3, 0.2]))
    result = measured.metrics(ONE_RANK)
    # wins over (0.1, 0.9, 0.9, 0.3): 0.5 -> 2, 0.8 -> 2, 0.9 -> 2 and two ties, 0.2 -> 1
    assert result["val/score_orders_correct_first"] == pytest.approx((2 + 2 + 3 + 1) / 16)
    assert result["val/score_greedy"] == 0.0
    assert result["val/score_sampled"] == pytest.approx((0.1 + 0.5 + 0.9 + 0.9 + 0.8 + 0.9 + 0.3 + 0.2) / 8)


@pytest.mark.parametrize("reward", [0, 1])
def test_score_order_without_right_or_wrong_samples_is_nan(tokenizer, reward):
    validation = Validation(4, ["given"], "given", scored=True)
    validation.add(*judged([reward] * 10), tokenizer)
    validation.add_scores(torch.arange(10.0))
    assert math.isnan(validation.metrics(ONE_RANK)["val/score_orders_correct_first"])


def test_reward_that_does_not_apply_is_not_counted(tokenizer):
    validation = Validation(4, ["given"], "given")
    validation.add(*judged([1, math.nan, 1, math.nan, math.nan, 1, 1, 1, 1, 1]), tokenizer)
    result = validation.metrics(ONE_RANK)
    assert result["val/given_sampled"] == 1.0  # of five
    assert result["val/fraction_correct_sampled"] == 1.0
    assert result["val/pass@2"] == 1.0  # of the prompt whose samples were all judged


def test_only_lengths_and_scores_are_known_without_reward_functions(tokenizer):
    batch, rollout = judged(REWARDS)
    validation = Validation(4, scored=True)
    validation.add(batch, type(rollout)(**{**vars(rollout), "rewards": {}}), tokenizer)
    validation.add_scores(torch.zeros(10))
    assert set(validation.metrics(ONE_RANK)) == {"val/response_tokens_mean", "val/truncated_fraction", *of_one("score")}


def test_only_mean_rewards_are_logged_without_a_metric(tokenizer):
    validation = Validation(4, ["given"], scored=True)
    validation.add(*judged([2.5 * reward for reward in REWARDS]), tokenizer)
    validation.add_scores(torch.arange(10.0))
    result = validation.metrics(ONE_RANK)
    assert set(result) == {
        "val/response_tokens_mean", "val/truncated_fraction", *of_one("given"), *of_one("score"),
    }  # fmt: skip
    assert result["val/given_best@4"] == 2.5
    assert result["val/given_greedy"] == result["val/given_sampled"] == 1.25


def test_sample_counts_are_powers_of_two_and_the_total():
    assert draw_sizes(1) == [1]
    assert draw_sizes(4) == [1, 2, 4]
    assert draw_sizes(9) == [1, 2, 4, 8, 9]


def test_means_and_deviations_equal_those_of_verl(tokenizer):
    for case in golden("validation")["means"]:
        rewards = case["rewards"]
        rows = [Response([4], [5], reward) for reward in (0.0, *rewards)]
        validation = Validation(len(rewards), ["given"])
        validation.add(prompt_batch([0], [[4]], ["a"], {}), rollout_of(rows, dtype=torch.float64), tokenizer)
        result = validation.metrics(ONE_RANK)
        assert_close(result["val/given_sampled"], case["mean"], rtol=1e-9)
        assert_close(result["val/given_sampled_std"], case["std"], rtol=1e-9)


def test_missing_reward_excludes_its_prompt_from_comparisons_of_samples(tokenizer):
    validation = Validation(4, ["given"], answer=lambda completions: completions)
    validation.add(*judged([0, math.nan, 2, 4, 6, 0, 1, 2, 3, 4]), tokenizer)
    result = validation.metrics(ONE_RANK)
    assert result["val/given_sampled"] == pytest.approx(((2 + 4 + 6) / 3 + (1 + 2 + 3 + 4) / 4) / 2)  # over prompts
    center = (result["val/given_sampled_low"] + result["val/given_sampled_high"]) / 2
    assert result["val/given_sampled"] == pytest.approx(center)
    assert result["val/given_best@4"] == 4.0  # of the second prompt alone
    assert result["val/given_worst@4"] == 1.0
    assert result["val/given_sampled_std"] == pytest.approx(1.25**0.5)
    assert result["val/given_maj@4"] == 2.5


def test_nan_score_is_visible(tokenizer):
    validation = Validation(4, ["given"], scored=True)
    validation.add(*judged(REWARDS), tokenizer)
    validation.add_scores(torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, 8, math.nan]))
    result = validation.metrics(ONE_RANK)
    assert result["val/score_greedy"] == 2.5
    for kind in ("sampled", "sampled_std", "best@2", "worst@4"):
        assert math.isnan(result[f"val/score_{kind}"])


def test_truncated_responses_count_with_their_reward(tokenizer):
    whole, cut = (Validation(4, ["given"], "given") for _ in range(2))
    whole.add(*judged(REWARDS), tokenizer)
    cut.add(*judged(REWARDS, truncated=[True] * 10), tokenizer)
    differing = {name for name, value in whole.metrics(ONE_RANK).items() if cut.metrics(ONE_RANK)[name] != value}
    assert differing == {"val/truncated_fraction"}


# -- votes -------------------------------------------------------------------------------------------------------------


def responses_with_letters(words, rewards):
    """Return one prompt with a greedy response and samples that consist of the given letters."""
    rows = [Response([4], [4 + "abcdefg".index(word)], reward) for word, reward in zip(words, rewards, strict=True)]
    return prompt_batch([0], [[4]], ["a"], {}), rollout_of(rows)


def test_samples_vote_with_their_extracted_answers(tokenizer):
    extracted_from = []

    def answer(completions):
        extracted_from.append(completions)
        return [None if output == "g" else output for output in completions]

    validation = Validation(5, ["given"], "given", answer)
    validation.add(*responses_with_letters("aabcag", [0, 1, 0, 0, 1, 0]), tokenizer)  # the greedy response has no vote
    validation.add(*responses_with_letters("accbbg", [0, 0, 0, 1, 1, 0.5]), tokenizer)
    result = validation.metrics(ONE_RANK)
    assert extracted_from == [["a", "b", "c", "a", "g"], ["c", "c", "b", "b", "g"]]
    # a b c a -: of all five a wins;  c c b b -: c and b tie
    assert result["val/given_maj@5"] == result["val/maj@5"] == pytest.approx((1 + 0.5) / 2)
    # of four: a b c a, a b a -, a c a - for a, and a b c - twice a tie of three;  then b wins as often as c
    first = (1 + 1 / 3 + 1 / 3 + 1 + 1) / 5
    assert result["val/maj@4"] == pytest.approx((first + 0.5) / 2)
    # of two: ab ac aa a- bc ba b- ca c- a- earn 5 of 10;  cc cb cb c- cb cb c- bb b- b- as well
    assert result["val/given_maj@2"] == pytest.approx(0.5)


@pytest.mark.parametrize("answers", [["a"], [["a"]] * 4])
def test_invalid_answers_of_the_vote_raise(tokenizer, answers):
    validation = Validation(4, ["given"], answer=lambda completions: answers)
    with pytest.raises(RuntimeError, match=r"^val_answer returned .* for 4 completions, expected a text or a number"):
        validation.add(*judged(REWARDS), tokenizer)


def test_answers_that_rewards_return_vote_unless_a_function_extracts_them(tokenizer):
    # Prompt 0: samples 1 0 0 0 with answers 7 8 8 none: 8 wins with 0. Prompt 1: 1 1 0 1 with 5 6 6 6: 6 with 2/3.
    batch, rollout = judged([1, 1, 0, 0, 0, 0, 1, 1, 0, 1])
    found = ["7", "7", "8", "8", None, "5", "5", "6", "6", "6"]
    other = ["a"] * 10

    def majority(answers, extract=None, metric="given"):
        validation = Validation(4, ["given"], metric, extract)
        validation.add_answers(answers)
        validation.add(batch, rollout, tokenizer)
        return validation.metrics(ONE_RANK)

    expected = pytest.approx((0 + 2 / 3) / 2)
    assert majority({"given": found})["val/maj@4"] == expected
    assert majority({"given": found})["val/given_maj@4"] == expected
    assert majority({"other": other, "given": found})["val/maj@4"] == expected  # of the metric
    assert majority({"given": [None] * 10, "other": found})["val/maj@4"] == expected  # the first that found one
    assert majority({"other": other, "more": found})["val/maj@4"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert "val/given_maj@4" not in majority({"given": [None] * 10})
    extracted = majority({"given": found}, extract=lambda completions: ["a"] * len(completions))
    assert extracted["val/maj@4"] == pytest.approx((1 / 4 + 3 / 4) / 2)


def test_ranks_without_answers_log_the_same_names(tokenizer):
    batch, rollout = judged(REWARDS)
    answers = [["x"] * 5, [None] * 5]

    def rank(number, ranks):
        validation = Validation(4, ["given"], "given")
        rows = list(range(5 * number, 5 * number + 5))
        validation.add_answers({"given": answers[number]})
        validation.add(batch[number : number + 1], rollout[rows], tokenizer)
        return validation.metrics(ranks)

    def rank_without_prompts(ranks):
        return Validation(4, ["given"], "given").metrics(ranks)

    first, second = over_ranks(*(partial(rank, number) for number in (0, 1)))
    assert first == pytest.approx(second, nan_ok=True)
    assert first["val/maj@4"] == pytest.approx((1 / 4 + 3 / 4) / 2)  # where nobody votes, all samples count
    first, second = over_ranks(partial(rank, 0), rank_without_prompts)
    assert first == pytest.approx(second, nan_ok=True)
    assert first["val/maj@4"] == pytest.approx(1 / 4)


# -- sources -----------------------------------------------------------------------------------------------------------


def with_sources(batch, column, sources):
    pairs = zip(batch, sources, strict=True)
    return replace(
        batch, prompts=[replace(prompt, columns={**prompt.columns, column: value}) for prompt, value in pairs]
    )


@pytest.mark.parametrize("column", ["source", "data_source"])
def test_each_source_has_separate_metrics(tokenizer, column):
    batch, rollout = judged(REWARDS)
    both, first, second = Validation(4, ["given"], "given", None, ["x", "y"], True), *one_by_one(tokenizer)
    both.add(with_sources(batch, column, ["x", "y"]), rollout, tokenizer)
    scores = normal(10, seed=1)
    both.add_scores(scores)
    result = both.metrics(ONE_RANK)
    for source, rows, one in (("x", slice(0, 5), first), ("y", slice(5, 10), second)):
        one.add(batch[:1], rollout[list(range(10))[rows]], tokenizer)
        one.add_scores(scores[rows])
        expected = one.metrics(ONE_RANK)
        assert {name for name in result if name.startswith(f"val/{source}/")} == {
            name.replace("val/", f"val/{source}/") for name in expected
        }
        for name, value in expected.items():
            assert result[name.replace("val/", f"val/{source}/")] == pytest.approx(value, nan_ok=True)
    assert (
        result["val/fraction_correct_sampled"]
        == (result["val/x/fraction_correct_sampled"] + result["val/y/fraction_correct_sampled"]) / 2
    )


def one_by_one(tokenizer):
    return [Validation(4, ["given"], "given", scored=True) for _ in range(2)]


def data_with(sources, column="source"):
    rests = [{} if source is None else {column: source} for source in sources]
    return SimpleNamespace(examples={"val": [SimpleNamespace(columns=rest) for rest in rests]})


def test_sources_are_found_in_all_validation_data():
    assert sources_in(data_with(["b", "a", "b", None])) == ["a", "b"]
    assert sources_in(data_with([2, 1], "data_source")) == ["1", "2"]
    assert sources_in(data_with(["a", "a"])) == []  # the overall metrics are its own
    assert sources_in(SimpleNamespace(examples={"train": []})) == []


def test_column_that_is_unique_per_row_defines_no_sources(caplog):
    caplog.set_level(logging.INFO, "lightning_rlhf")
    assert len(sources_in(data_with(range(32)))) == 32
    assert sources_in(data_with(range(33))) == []
    assert "the validation data has 33 sources, too many for separate metrics" in caplog.text


# -- ranks -------------------------------------------------------------------------------------------------------------


def validation_of(tokenizer, prompts, seed=7):
    """Return a validation of some of six prompts, with real-valued and missing rewards, votes, sources and scores."""
    validation = Validation(4, ["given"], "given", lambda output: output, ["x", "y"], scored=True)
    rewards, scores = normal(6, 5, seed=seed).round().tolist(), normal(6, 5, seed=seed + 1)
    rewards[2][3] = math.nan
    for prompt in prompts:
        rows = [
            Response([4], [4 + (3 * prompt + i) % 5] * (1 + i % 2), reward, truncated=i == 2)
            for i, reward in enumerate(rewards[prompt])
        ]
        batch = prompt_batch([prompt], [[4]], ["a"], {"source": ["x" if prompt < 4 else "y"]})
        validation.add(batch, rollout_of(rows), tokenizer)
        validation.add_scores(scores[prompt])
    return validation


@pytest.mark.parametrize("shares", [((0, 1, 2), (3, 4, 5)), ((5, 0), (1, 2, 3, 4)), ((0, 1, 2, 3, 4, 5), ())])
def test_prompts_divided_over_ranks_give_the_metrics_of_one_rank(tokenizer, shares):
    """This includes ranks without prompts of a source, and ranks without prompts."""
    expected = validation_of(tokenizer, range(6)).metrics(ONE_RANK)

    def rank(number):
        return lambda ranks: validation_of(tokenizer, shares[number]).metrics(ranks)

    for result in over_ranks(rank(0), rank(1)):
        assert list(result) == list(expected)
        assert result == pytest.approx(expected, nan_ok=True, rel=1e-12)


def test_greedy_responses_are_stored_with_rewards_and_columns(measured):
    assert measured.samples == [
        {"prompt": "a", "response": "b" * 9, "given": 1.0, "answer": "x"},
        {"prompt": "a", "response": "b" * 9, "given": 0.0, "answer": "y"},
    ]


def test_at_most_64_samples_are_stored(tokenizer):
    validation = Validation(4, ["given"], "given")
    for _ in range(40):
        validation.add(*judged(REWARDS), tokenizer)
    assert len(validation.samples) == 64


# -- under a Trainer ---------------------------------------------------------------------------------------------------


class ValidationRecorder(Callback):
    """Records the step and the metrics of every validation."""

    def __init__(self):
        self.entries = []

    def on_validation_end(self, trainer, pl_module):
        self.entries.append((trainer.global_step, {k: float(v) for k, v in trainer.callback_metrics.items()}))

    @property
    def steps(self):
        return [step for step, _ in self.entries]


@pytest.mark.quick_cases(2)
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
def test_validation_runs_before_during_and_after_training(run, loop, trainer, steps):
    diary = ValidationRecorder()
    run(loop=loop, trainer=trainer, data={"val": InMemory(ROWS)}, callbacks=[diary]).fit()
    assert diary.steps == steps


def test_nothing_is_generated_without_validation_data(run):
    diary = ValidationRecorder()
    made = run(callbacks=[diary]).fit()
    assert diary.entries == []
    assert [call for call in made.engine.calls if call.startswith("generate")] == ["generate 2", "generate 2"]


# An engine's answers: greedily right to a and bb; of two samples right to a: one, bb: none, ccc: both, d: one.
GREEDY = {"a": "a", "bb": "b", "ccc": "d", "d": "a"}
SAMPLED = {"a": "ab", "bb": "ac", "ccc": "cc", "d": "da"}
RIGHT = {row["prompt"]: row["answer"] for row in ROWS}


def test_metrics_under_a_trainer_equal_those_computed_by_hand(run, monkeypatch):
    diary = ValidationRecorder()
    made = run(
        loop={"val_samples": 2},
        data={"val": InMemory(ROWS), "val_batch_size": 3},
        model={"reward_model": TinyModel(seed=5)},
        callbacks=[diary],
    )
    encode = {letter: 4 + i for i, letter in enumerate("abcdefg")}
    texts = {tuple(encode[letter] for letter in row["prompt"]): row["prompt"] for row in ROWS}

    def generate(prompts, sampling, seeds):
        output, number = [], {}
        for ids in prompts:
            prompt = texts[tuple(ids)]
            number[prompt] = number.get(prompt, -1) + 1
            word = GREEDY[prompt] if sampling.temperature == 0 else SAMPLED[prompt][number[prompt] % 2]
            output.append(Completion([encode[word], 2], [-1.0, -1.0], "stop", made.engine.version))
        return output

    monkeypatch.setattr(made.engine, "generate", generate)
    made.fit()
    result = diary.entries[0][1]
    assert result["val/fraction_correct_greedy"] == 0.5
    assert result["val/fraction_correct_sampled"] == (1 + 0 + 2 + 1) / 8
    assert result["val/pass@2"] == 3 / 4
    assert result["val/response_tokens_mean"] == 2.0
    shown = {"prompt": "ccc", "response": "d", "exact": 0.0, "answer": "c", "ground_truth": "c"}
    assert made.loop.validation_samples[2] == shown

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
    assert result["val/score_orders_correct_first"] == pytest.approx(sum(wins) / len(wins))
    assert result["val/score_sampled"] == pytest.approx(sum(marks[pair] for pair in pairs) / 8, abs=1e-5)


def test_run_without_a_metric_logs_rewards_and_no_accuracy(run):
    made = run(loop={"val_metric": None}, data={"val": InMemory(ROWS)}).fit()
    assert made.metrics["val/exact_greedy"] > 0
    assert not {"val/fraction_correct_greedy", "val/fraction_correct_sampled"} & set(made.metrics)


def test_metric_can_be_selected(run):
    def never(completions):
        return [0.0] * len(completions)

    rewards = [RewardFunction(never), RewardFunction(exact, weight=0.0)]
    made = run(loop={"rewards": rewards, "val_metric": "exact"}, data={"val": InMemory(ROWS)}).fit()
    assert made.metrics["val/fraction_correct_greedy"] == made.metrics["val/exact_greedy"] > 0
    assert made.metrics["val/never_greedy"] == 0


def first_letters(completions):
    """Return the first letter of each completion, for a dotted path in YAML."""
    return [text[:1] or None for text in completions]


def test_answers_are_extracted_by_a_configured_function():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutLoop, "loop")
    parsed = parser.parse_object({"loop": {"val_answer": f"{first_letters.__module__}.first_letters"}})
    assert parser.instantiate(parsed).loop.val_answer.__name__ == "first_letters"


def test_votes_and_sources_under_a_trainer(run):
    rows = [{**row, "source": "ends" if row["prompt"] in "ad" else "middle"} for row in ROWS]
    loop = {"val_samples": 3, "val_answer": first_letters}
    result = run(loop=loop, data={"val": InMemory(rows)}, texts=("a", "b", "b", "d")).fit().metrics
    assert result["val/exact_greedy"] == (result["val/ends/exact_greedy"] + result["val/middle/exact_greedy"]) / 2
    for name in ("maj@3", "pass@3", "exact_maj@2", "exact_best@3", "exact_worst@2", "exact_sampled_std"):
        assert math.isfinite(result[f"val/{name}"])
        assert result[f"val/{name}"] == pytest.approx((result[f"val/ends/{name}"] + result[f"val/middle/{name}"]) / 2)


def with_pred(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "pred": solution_str[:1]}


def test_verls_pred_votes_under_a_trainer_as_an_extracted_answer(run):
    results = []
    for answer in (None, first_letters):
        loop = {
            "val_samples": 3,
            "val_metric": "with_pred",
            "rewards": [RewardFunction(with_pred)],
            "val_answer": answer,
        }
        results.append(run(loop=loop, data={"val": InMemory(ROWS)}, texts=("a", "b", "b", "d")).fit().metrics)
    names = ["val/maj@3", "val/maj@2", "val/with_pred_maj@3"]
    assert [results[0][name] for name in names] == [results[1][name] for name in names]


def test_validation_does_not_change_the_global_random_state(run):
    states = []

    class Watch(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            states.append((random.getstate(), torch.get_rng_state()))

        def on_validation_end(self, trainer, pl_module):
            states.append((random.getstate(), torch.get_rng_state()))

    run(loop={"val_samples": 4, "val_answer": first_letters}, data={"val": InMemory(ROWS)}, callbacks=[Watch()]).fit()
    assert len(states) > 2
    for before, after in zip(states[::2], states[1::2], strict=True):
        assert before[0] == after[0]
        assert torch.equal(before[1], after[1])


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_validation_uses_averaged_weights_and_training_continues_with_the_actor_weights(run, monkeypatch):
    made = run(data={"val": InMemory(ROWS)}, trainer={"max_steps": 2}, callbacks=[EMAWeightAveraging(decay=0.5)])
    pushed, push = [], made.engine.update_weights

    def update_weights(parameters, version):
        taken = [(name, tensor.clone()) for name, tensor in parameters]
        pushed.append((version, torch.cat([tensor.flatten() for _, tensor in taken])))
        push(taken, version)

    monkeypatch.setattr(made.engine, "update_weights", update_weights)
    made.fit()
    final = torch.cat([tensor.flatten() for _, tensor in made.module.role_strategy.iter_full_params("actor")])
    assert [version for version, _ in pushed] == [0, 0, 1, 2]  # validation, two rollouts, validation
    assert torch.equal(pushed[0][1], pushed[1][1])
    assert torch.equal(pushed[3][1], final)  # Lightning leaves the average in the module
    assert not torch.equal(pushed[2][1], final)
