"""What a step says of its rollout, on two responses worked by hand."""

from functools import partial

import pytest
import torch

from lightning_rlhf.functional.masked import this_rank_only
from lightning_rlhf.modules.rollout_metrics import describe
from lightning_rlhf.types import Experience
from tests.helpers import assert_close, over_ranks
from tests.stand_ins import Response, rollout_of

ROWS = [Response([3, 4], [5, 6, 7], 2.0, [True, False, True], truncated=True), Response([3], [5], -1.0)]
MASK = torch.tensor([[True, False, True], [True, False, False]])


@pytest.fixture
def experience():
    rollout = rollout_of(ROWS)  # the engine said -1 for every token of the policy
    rollout.rewards["partly"] = torch.tensor([4.0, torch.nan])
    ones = torch.full((2, 3), 9.0)  # nobody may look at what lies outside the mask
    return Experience(
        rollout,
        reward=torch.tensor([2.5, -1.0]),
        old_logprobs=torch.where(MASK, torch.tensor([[-1.5, 0, -1.0], [-2.0, 0, 0]]), ones),
        ref_logprobs=torch.where(MASK, torch.tensor([[-1.0, 0, -3.0], [-2.0, 0, 0]]), -ones),
        values=torch.where(MASK, torch.tensor([[1.0, 0, 2.0], [0.0, 0, 0]]), ones),
        token_rewards=torch.tensor([[0.5, 0, 2.0], [-1.0, 0, 0]]),
        advantages=torch.zeros(2, 3),
        returns=torch.where(MASK, torch.tensor([[2.0, 0, 2.0], [-1.0, 0, 0]]), ones),
        mask=torch.zeros_like(MASK),  # a correction rejected everything: what is measured is measured before
        weights=ones,
        chosen=MASK,
    )


EXPECTED = {
    "reward/mean": 0.75,  # (2.5 - 1) / 2
    "reward/std": 1.75,
    "reward/from_model": 0.25,  # (0.5 + 0) / 2: the rules gave 2 and -1
    "kl/ref": 0.75,  # nats per response: (-0.5 + 2 + 0) / 2
    "reward/given": 0.5,
    "reward/partly": 4.0,  # where it applied
    "rollout/response_tokens_mean": 2.0,
    "rollout/response_tokens": 4.0,
    "rollout/truncated_fraction": 0.5,
    "rollout/logprob_diff_mean": 0.5,  # (0.5 + 0 + 1) / 3
    "rollout/logprob_diff_max": 1.0,
    "value/mean": 1.0,
    # returns 2, 2, -1 have variance 2; the errors 1, 0, -1 have variance 2/3
    "value/explained_variance": 2 / 3,
}


def test_every_metric_of_a_case_worked_by_hand(experience):
    metrics = describe(experience, this_rank_only, this_rank_only)
    assert metrics.keys() == EXPECTED.keys()
    for name, value in EXPECTED.items():
        assert_close(metrics[name], value)


def test_ranks_agree_on_the_metrics_of_both(experience):
    def rank(row, reduce):
        return describe(experience[[row]], reduce, reduce.maximum)

    for metrics in over_ranks(*(partial(rank, row) for row in (0, 1))):
        for name, value in EXPECTED.items():
            assert_close(metrics[name], value)
