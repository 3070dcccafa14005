"""ECHO: a supervised loss of the tokens that an environment wrote,, beside the policy loss."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf import ECHOModule, GRPOModule
from lightning_rlhf.extras.algorithms.echo import environment_mask
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.types import ConversationTokens
from tests.helpers import assert_close
from tests.stand_ins import TinyModel, fit, responses, rollout_of

pytestmark = pytest.mark.usefixtures("exact")
RATE = 0.1
MODEL = TinyModel(dtype="float64")
ROWS = responses(6, seed=8, observations=True)
WRITTEN = [[not sampled for sampled in row.mask] for row in ROWS]


def gradients(rollout, **options):
    """Return the gradient of one step, and its metrics."""
    options = {"micro_batch_tokens": 30, **options}
    sgd = partial(torch.optim.SGD, lr=RATE)
    kind = ECHOModule if "environment_coef" in options else GRPOModule
    module = kind(MODEL, optimizer=sgd, max_grad_norm=None, kl_loss=KLTerm(), **options)
    metrics = fit(module, [rollout]).callback_metrics
    first = dict(MODEL.causal().lm.named_parameters())
    return {name: (first[name] - p).detach() / RATE for name, p in module.actor.lm.named_parameters()}, metrics


def grouped():
    """Return the responses as two groups of three, so that they have advantages."""
    return replace(rollout_of(ROWS, dtype=torch.float64), group=torch.tensor([0, 0, 0, 1, 1, 1]))


def cross_entropy(rows=(0, 1, 2, 3, 4, 5)):
    """Return the mean cross-entropy of the environment's tokens of some rows, and its gradient."""
    lm, losses = MODEL.causal().lm, []
    for number in rows:
        row = ROWS[number]
        logprobs = lm(torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(-1, torch.tensor(row.tokens).unsqueeze(-1)).squeeze(-1)
        losses.append(-chosen[torch.tensor(WRITTEN[number])])
    loss = torch.cat(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in lm.named_parameters()}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("tokens", [9, 30, 1000])
def test_loss_is_that_of_the_policy_and_the_mean_cross_entropy(tokens, packing):
    assert sum(map(sum, WRITTEN)) > 4
    policy, _ = gradients(grouped())
    both, metrics = gradients(grouped(), environment_coef=0.7, micro_batch_tokens=tokens, packing=packing)
    loss, expected = cross_entropy()
    for name, value in both.items():
        assert_close(value, policy[name] + 0.7 * expected[name], rtol=1e-10, atol=1e-12)
    assert_close(metrics["loss/environment"], loss, rtol=1e-6)


def test_excluded_responses_do_not_count():
    included = torch.tensor([True, True, False, True, True, True])
    rollout = replace(grouped(), included=included)
    policy, _ = gradients(rollout)
    both, _ = gradients(rollout, environment_coef=1.0)
    _, expected = cross_entropy(included.nonzero().squeeze(1).tolist())
    for name, value in both.items():
        assert_close(value, policy[name] + expected[name], rtol=1e-10, atol=1e-12)


def test_first_token_of_a_branch_is_not_predicted():
    rollout = rollout_of(ROWS, dtype=torch.float64)
    starts = torch.zeros_like(rollout.response_mask)
    row = next(number for number, written in enumerate(WRITTEN) if any(written))
    starts[row, WRITTEN[row].index(True)] = True
    branched = replace(rollout, conversation=ConversationTokens(torch.zeros_like(rollout.rollout_logprobs), starts))
    mask, before = environment_mask(branched), environment_mask(rollout)
    assert torch.equal(mask, before & ~starts)
    assert mask.sum() == before.sum() - 1


def test_responses_without_an_environment_change_nothing():
    rows = responses(4, seed=3)
    rollout = rollout_of(rows, dtype=torch.float64)
    without, _ = gradients(rollout)
    with_it, metrics = gradients(rollout, environment_coef=1.0)
    assert all(torch.equal(value, without[name]) for name, value in with_it.items())
    assert metrics["loss/environment"].isnan()


def test_negative_weight_raises():
    with pytest.raises(ValueError, match="environment_coef must be at least 0, got -1"):
        ECHOModule(MODEL, environment_coef=-1)
