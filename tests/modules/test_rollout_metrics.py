"""Metrics of the rollout of a step, for two responses worked by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf.modules.metrics import describe
from lightning_rlhf.types import Experience
from tests.helpers import assert_close, float64, golden, over_ranks
from tests.stand_ins import Response, rollout_of

ROWS = [Response([3, 4], [5, 6, 7], 2.0, [True, False, True], truncated=True), Response([3], [5], -1.0)]
MASK = torch.tensor([[True, False, True], [True, False, False]])
LEARNT = torch.tensor([[True, False, False], [True, False, False]])  # a correction rejected a token
ROLES = ("actor", "ref", "reward_model", "critic")


@pytest.fixture
def experience():
    rollout = rollout_of(ROWS)  # the engine's log-probability is -1 for every policy token
    rollout.rewards["partly"] = torch.tensor([4.0, torch.nan])
    garbage = torch.full((2, 3), torch.nan)  # values outside the mask must not be used
    return Experience(
        rollout,
        reward=torch.tensor([2.5, -1.0]),
        old_logprobs=torch.where(MASK, torch.tensor([[-1.5, 0, -1.0], [-2.0, 0, 0]]), garbage),
        ref_logprobs=torch.where(MASK, torch.tensor([[-1.0, 0, -3.0], [-2.0, 0, 0]]), -garbage),
        values=torch.where(MASK, torch.tensor([[1.0, 0, 3.0], [0.5, 0, 0]]), garbage),
        token_rewards=torch.where(MASK, torch.tensor([[0.5, 0, 2.0], [-1.5, 0, 0]]), garbage),
        advantages=torch.where(LEARNT, torch.tensor([[1.0, 0, 0], [-2.0, 0, 0]]), garbage),
        returns=torch.where(LEARNT, torch.tensor([[2.0, 0, 0], [-1.0, 0, 0]]), garbage),
        mask=LEARNT,
        weights=garbage,
        selected_tokens=MASK,
    )


EXPECTED = {
    "reward/mean": 0.75,  # (2.5 - 1) / 2
    "reward/std": 1.75,
    "reward/max": 2.5,
    "reward/min": -1.0,
    "reward/after_kl_mean": 0.5,  # (2.5 - 1.5) / 2
    "reward/after_kl_max": 2.5,
    "reward/after_kl_min": -1.5,
    "reward/from_model": 0.25,  # (0.5 + 0) / 2: the rules gave 2 and -1
    "kl/ref": 0.75,  # nats per response: (-0.5 + 2 + 0) / 2
    "reward/given": 0.5,
    "reward/given_std": 1.5,
    "reward/partly": 4.0,  # where it applied
    "reward/partly_std": 0.0,
    "advantage/mean": -0.5,
    "advantage/max": 1.0,
    "advantage/min": -2.0,
    "return/mean": 0.5,
    "return/max": 2.0,
    "return/min": -1.0,
    "rollout/response_tokens": 3.0,  # that the policy sampled
    "rollout/response_tokens_mean": 1.5,
    "rollout/response_tokens_max": 2.0,
    "rollout/response_tokens_min": 1.0,
    "rollout/finished_tokens_mean": 1.0,
    "rollout/finished_tokens_max": 1.0,
    "rollout/finished_tokens_min": 1.0,
    "rollout/prompt_tokens_mean": 1.5,
    "rollout/prompt_tokens_max": 2.0,
    "rollout/prompt_tokens_min": 1.0,
    "rollout/truncated_fraction": 0.5,
    "reward/missing_fraction": 0.0,
    "rollout/logprob_diff_mean": 0.5,  # (0.5 + 0 + 1) / 3
    "rollout/logprob_diff_max": 1.0,
    "value/mean": 1.5,
    "value/max": 3.0,
    "value/min": 0.5,
    # returns 2, -1 have variance 9/4; the errors 1, -1.5 have variance 25/16
    "value/explained_variance": 1 - 25 / 36,
    "group/single_fraction": 1.0,
    "perf/rank_tokens_mean": 7.0,
    "perf/rank_tokens_max": 7.0,
    "perf/rank_tokens_min": 7.0,
}
OF_RANKS = {"perf/rank_tokens_mean": 3.5, "perf/rank_tokens_max": 5.0, "perf/rank_tokens_min": 2.0}


def test_every_metric_of_a_case_worked_by_hand(experience):
    metrics = describe(experience, ROLES)
    assert metrics.keys() == EXPECTED.keys()
    for name, value in EXPECTED.items():
        assert_close(metrics[name], value)


def test_ranks_agree_on_the_metrics_of_both(experience):
    def rank(row, ranks):
        return describe(experience[[row]], ROLES, ranks)

    for metrics in over_ranks(*(partial(rank, row) for row in (0, 1))):
        for name, value in (EXPECTED | OF_RANKS).items():
            assert_close(metrics[name], value)


def test_metrics_of_missing_roles_are_omitted(experience):
    metrics = describe(experience, ("actor",))
    missing = {"kl/ref", "reward/from_model", "value/explained_variance"}
    missing |= {f"{stem}{end}" for stem in ("reward/after_kl_", "value/") for end in ("mean", "max", "min")}
    assert EXPECTED.keys() - metrics.keys() == missing


def in_groups(rewards, groups):
    rollout = rollout_of([Response([3], [5], reward) for reward in rewards])
    blank, mask = torch.zeros(len(rewards), 1), torch.ones(len(rewards), 1, dtype=torch.bool)
    rollout = replace(rollout, group=torch.tensor(groups))
    tensors = [blank] * 6
    return Experience(rollout, rollout.reward, *tensors, mask=mask, weights=blank, selected_tokens=mask)


def test_metrics_within_groups():
    # group 7: 1, 3, 5 with variance 4;  group 2: alone;  group 0: equal;  group 4: -1, 0 with variance 1/2
    inputs = in_groups([1, 0.1, 3, 9, 0.1, -1, 5, 0], [7, 0, 7, 2, 0, 4, 7, 4])
    expected = {
        "group/single_fraction": 1 / 4,
        "group/equal_reward_fraction": 1 / 3,
        "group/reward_std_mean": (2 + 0 + 0.5**0.5) / 3,
    }
    order = torch.randperm(8)
    shares = torch.tensor([0, 2, 6, 3]), torch.tensor([1, 4, 5, 7])

    def rank(rows):
        return lambda ranks: describe(inputs[rows], (), ranks)

    alone = [describe(inputs[rows], ()) for rows in (range(8), order)]
    for metrics in (*alone, *over_ranks(*(rank(rows) for rows in shares))):
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_metrics_equal_those_of_verl_for_the_same_batch():
    recorded = golden("validation")["batch"]
    tensors = {name: float64(values) for name, values in recorded["inputs"].items()}
    mask, verl = tensors["mask"].bool(), recorded["outputs"]["data"]
    reward, lengths = tensors["reward"], tensors["mask"].sum(dim=1).int()
    rows = [
        Response([3] * int(prompt), [5] * int(length), float(score))
        for prompt, length, score in zip(tensors["prompt_lengths"], lengths, reward, strict=True)
    ]
    rewards = (-tensors["penalties"]).scatter_add(1, (lengths - 1).long().unsqueeze(1), reward.unsqueeze(1))
    logprobs = tensors["logprobs"]
    experience = Experience(
        rollout_of(rows, dtype=torch.float64), reward, logprobs, logprobs, tensors["values"], rewards,
        tensors["advantages"], tensors["returns"], mask, tensors["weights"], mask,
    )  # fmt: skip
    ours = describe(experience, ("critic", "ref"))
    stems = {
        "reward/": "critic/score/", "reward/after_kl_": "critic/rewards/", "advantage/": "critic/advantages/",
        "return/": "critic/returns/", "value/": "critic/values/", "rollout/response_tokens_": "response_length/",
        "rollout/finished_tokens_": "response_length_non_aborted/", "rollout/prompt_tokens_": "prompt_length/",
    }  # fmt: skip
    for stem, theirs in stems.items():
        for end in ("mean", "max", "min"):
            whole = "length" in theirs  # which verl counts in float32
            assert_close(ours[f"{stem}{end}"], verl[f"{theirs}{end}"], rtol=1e-6 if whole else 1e-9)
    assert_close(ours["value/explained_variance"], verl["critic/vf_explained_var"], rtol=1e-8)
