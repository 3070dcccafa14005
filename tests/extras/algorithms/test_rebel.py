"""REBEL: the log-ratios of pairs of neighbouring responses regress on their difference in reward."""

from functools import partial

import pytest
import torch

from lightning_rlhf import REBELModule
from lightning_rlhf.extras.algorithms.preference_losses import REBELLoss
from lightning_rlhf.objectives.kl_controllers import KLTerm
from tests.extras.algorithms.test_dpo import models
from tests.extras.algorithms.test_online_dpo import answer_logprobs
from tests.helpers import assert_close
from tests.stand_ins import Response, TinyModel, fit, rollout_of

# Two prompts with four responses each: pairs (0, 1), (2, 3), (4, 5), (6, 7); the rewards of the second are equal.
REWARDS = (1.0, 3.0, 2.0, 2.0, 0.5, -1.0, 0.0, 4.0)


def rollout(size=4, dtype=torch.float32):
    draw = torch.Generator().manual_seed(4)
    rows = []
    for i, reward in enumerate(REWARDS):
        length = int(torch.randint(1, 7, (), generator=draw))
        rows.append(Response([3 + i // size, 4], torch.randint(11, (length,), generator=draw).tolist(), reward))
    made = rollout_of(rows, dtype=dtype)
    made.group[:] = torch.arange(len(rows)) // size
    return made


def rebel(dtype="float32", lr=0.0, **options):
    sgd = partial(torch.optim.SGD, lr=lr)
    settings = {"loss": REBELLoss(0.5), "minibatch_size": 8, "optimizer": sgd} | options
    module = REBELModule(TinyModel(seed=0, dtype=dtype), ref=TinyModel(seed=1, dtype=dtype), **settings)
    module.configure_model()
    return module


def test_loss_before_the_first_update_is_the_mean_square_of_reward_differences():
    metrics = fit(rebel(), [rollout()]).callback_metrics
    assert_close(metrics["train/loss"], (2**2 + 0 + 1.5**2 + 4**2) / 4)
    assert_close(metrics["train/reward_difference"], (2 + 0 + 1.5 + 4) / 4)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 1000])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gradient_is_that_of_the_regression(micro_batch_tokens, kl_coef):
    options = {"kl_reward": KLTerm(kl_coef), "micro_batch_tokens": micro_batch_tokens, "max_grad_norm": None}
    module = rebel("float64", 1.0, **options)
    before = [p.detach().clone() for p in module.actor.parameters()]
    made = rollout(dtype=torch.float64)
    fit(module, [made])
    steps = [old - new.detach() for old, new in zip(before, module.actor.parameters(), strict=True)]
    actor, ref = models("float64")
    logprobs = answer_logprobs(actor, made)
    rewards = made.reward - kl_coef * (logprobs - answer_logprobs(ref, made)).detach()
    ratios = logprobs - logprobs.detach()
    losses = [((ratios[i] - ratios[i + 1]) / 0.5 - (rewards[i] - rewards[i + 1])) ** 2 for i in (0, 2, 4, 6)]
    gradients = torch.autograd.grad(sum(losses) / 4, list(actor.parameters()))
    assert max(float((one - other).abs().max()) for one, other in zip(steps, gradients, strict=True)) <= 1e-11


def test_updates_make_the_better_response_of_each_pair_more_likely():
    made = rollout()
    module = rebel(lr=0.02, update_epochs=10)
    metrics = fit(module, [made]).callback_metrics
    actor, _ = models("float32")
    gain = answer_logprobs(module.actor.lm, made) - answer_logprobs(actor, made)
    for better, worse in ((1, 0), (4, 5), (7, 6)):
        assert gain[better] > gain[worse]
    assert metrics["policy/updates"] == 10


def test_pair_with_an_excluded_response_is_skipped():
    made = rollout()
    made.included[7] = False
    metrics = fit(rebel(), [made]).callback_metrics
    assert_close(metrics["train/loss"], (2**2 + 0 + 1.5**2) / 3)


def test_odd_number_of_responses_is_rejected():
    made = rollout()[range(6)]
    made.group[:] = torch.arange(6) // 3
    with pytest.raises(ValueError, match=r"group_size must be even, got 3"):
        fit(rebel(minibatch_size=6), [made])


def test_options_without_effect_do_not_exist():
    for option in ("policy_loss", "aggregation", "correction", "kl_loss", "ent_coef", "advantages"):
        with pytest.raises(TypeError, match=option):
            rebel(**{option: None})
