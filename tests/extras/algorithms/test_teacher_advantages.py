"""TeacherLogRatio: advantages from the log-ratio of a teacher to the policy, alone and with those of rewards."""

import pytest
import torch

from lightning_rlhf import RLHFModule
from lightning_rlhf.extras.algorithms.teacher_advantages import TeacherLogRatio
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.base import AdvantageInputs
from lightning_rlhf.objectives.group_advantages import GRPO, RLOO
from tests.helpers import golden
from tests.stand_ins import TinyModel

LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.25, 9.0]], dtype=torch.float64)
TEACHER = torch.tensor([[-0.5, -4.0, -0.5], [-1.0, -0.75, -9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def inputs(**further):
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    fields = {"mask": MASK, "group": torch.zeros(2, dtype=torch.long), "logprobs": LOGPROBS, "ref_logprobs": TEACHER}
    return AdvantageInputs(rewards, **{**fields, **further})


def test_advantage_is_the_log_ratio_of_the_teacher_to_the_policy():
    advantages, returns = TeacherLogRatio()(inputs())
    assert advantages.tolist() == [[0.5, -2.0, 0.0], [2.0, -0.5, 0.0]]
    assert torch.equal(returns, advantages)
    clipped, _ = TeacherLogRatio(clip=1.0)(inputs())
    assert clipped.tolist() == [[0.5, -1.0, 0.0], [1.0, -0.5, 0.0]]


@pytest.mark.parametrize("case", golden("teacher_advantages")["cases"], ids=lambda case: case["coefficient"])
def test_advantages_equal_those_of_tinker_cookbook(case):
    recorded = golden("teacher_advantages")
    for policy, teacher, expected in zip(recorded["logprobs"], recorded["teacher"], case["advantages"], strict=True):
        row = torch.tensor([policy, teacher], dtype=torch.float64)
        mask = torch.ones(1, len(policy), dtype=torch.bool)
        fields = {"group": torch.zeros(1, dtype=torch.long), "logprobs": row[:1], "ref_logprobs": row[1:]}
        advantages, _ = TeacherLogRatio()(AdvantageInputs(torch.zeros(1, len(policy)).double(), mask, **fields))
        assert (case["coefficient"] * advantages[0]).tolist() == expected


def test_advantages_of_rewards_are_added_with_their_weight():
    # RLOO of the rewards 1 and 0: 1 and -1.
    advantages, returns = TeacherLogRatio(rewards=RLOO(), reward_coef=0.5)(inputs())
    assert advantages.tolist() == [[1.0, -1.5, 0.5], [1.5, -1.0, 0.0]]
    assert torch.equal(returns, RLOO()(inputs())[1])
    whole, _ = TeacherLogRatio(rewards=RLOO())(inputs())  # a weight of 1, so half of RLOO's 1 and -1 more
    assert (whole - advantages).tolist() == [[0.5] * 3, [-0.5, -0.5, 0.0]]


def test_expected_gradient_is_that_of_the_reverse_kl():
    """Sum over all tokens of one distribution: E[A grad log p] = -grad KL(p || q)."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    logp, logq = logits.log_softmax(0), teacher.log_softmax(0)
    one = torch.ones(7, 1, dtype=torch.bool)
    each = AdvantageInputs(
        torch.zeros(7, 1, dtype=torch.float64), one, torch.arange(7), logprobs=logp.detach().unsqueeze(1),
        ref_logprobs=logq.unsqueeze(1),
    )  # fmt: skip
    advantages = TeacherLogRatio()(each)[0].squeeze(1)
    (policy,) = torch.autograd.grad((logp.exp().detach() * advantages * logp).sum(), logits, retain_graph=True)
    (kl,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits)
    torch.testing.assert_close(policy, -kl, atol=1e-14, rtol=0)
    assert kl.abs().max() > 1e-2


def test_needs_are_those_of_the_estimator_of_the_rewards():
    alone, with_groups, with_critic = TeacherLogRatio(), TeacherLogRatio(GRPO()), TeacherLogRatio(GAE())
    assert (alone.needs_rewards, alone.needs_groups, alone.reads_total_reward) == (False, False, False)
    assert (with_groups.needs_rewards, with_groups.needs_groups, with_groups.reads_total_reward) == (True, True, True)
    assert with_critic.needs_critic
    assert not alone.needs_critic
    assert alone == TeacherLogRatio()


def test_bad_arguments_raise():
    for options, message in (
        ({"clip": 0.0}, "clip must be positive"),
        ({"reward_coef": -1.0}, "reward_coef must be at least 0"),
        ({"rewards": TeacherLogRatio()}, "an estimator of advantages from rewards"),
    ):
        with pytest.raises(ValueError, match=message):
            TeacherLogRatio(**options)
    with pytest.raises(ValueError, match="needs the log-probabilities of the policy and of the reference"):
        TeacherLogRatio()(inputs(ref_logprobs=None))
    with pytest.raises(ValueError, match="the advantages are log-ratios of a teacher: set ref"):
        RLHFModule(TinyModel(), advantages=TeacherLogRatio())
