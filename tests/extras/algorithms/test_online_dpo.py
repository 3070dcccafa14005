"""Online DPO: the best against the worst response of each prompt; ties are excluded and counted."""

from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from lightning_rlhf import OnlineDPOModule
from lightning_rlhf.extras.algorithms.preference_losses import DPOLoss, IPOLoss
from lightning_rlhf.models.lora import LoRA
from tests.extras.algorithms.test_dpo import models
from tests.helpers import assert_close
from tests.stand_ins import Response, TinyModel, fit, rollout_of

# Three prompts with three responses each; the rewards of the second are all equal.
REWARDS = (1.0, 3.0, 2.0, 1.0, 1.0, 1.0, 0.5, -1.0, 0.0)
BEST, WORST = (1, 6), (0, 7)


def rollout(rewards=REWARDS, dtype=torch.float32):
    draw = torch.Generator().manual_seed(4)
    rows = []
    for i, reward in enumerate(rewards):
        prompt = [3 + i // 3, 4]
        length = int(torch.randint(1, 7, (), generator=draw))
        rows.append(Response(prompt, torch.randint(11, (length,), generator=draw).tolist(), reward))
    made = rollout_of(rows, dtype=dtype)
    made.group[:] = torch.arange(len(rows)) // 3
    return made


def online(dtype="float32", lr=0.0, **options):
    inputs = {
        "ref": TinyModel(seed=1, dtype=dtype), "optimizer": partial(torch.optim.SGD, lr=lr),
        "loss": DPOLoss(0.3), "minibatch_size": 9,
    }  # fmt: skip
    module = OnlineDPOModule(TinyModel(seed=0, dtype=dtype), **(inputs | options))
    module.configure_model()
    return module


def answer_logprobs(lm, made):
    result = []
    for i in range(len(made)):
        prompt = made.prompt_ids[i, : made.prompt_lengths[i]]
        answer = made.response_ids[i, : made.response_lengths[i]]
        scores = lm(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        result.append(scores.gather(1, answer[:, None]).sum())
    return torch.stack(result)


def expected(made, loss, dtype="float32"):
    actor, ref = models(dtype)
    ratios = answer_logprobs(actor, made) - answer_logprobs(ref, made).detach()
    if loss.length_normalized:
        ratios = ratios / made.response_lengths
    return ratios, loss(ratios[list(BEST)], ratios[list(WORST)]), actor


@pytest.mark.parametrize("micro_batch_tokens", [7, 30, 1000])
@pytest.mark.parametrize("loss", [DPOLoss(0.3), IPOLoss(0.3)], ids=["dpo", "ipo"])
def test_loss_compares_the_best_and_the_worst_response_of_each_prompt(loss, micro_batch_tokens):
    metrics = fit(online(loss=loss, micro_batch_tokens=micro_batch_tokens), [rollout()]).callback_metrics
    ratios, losses, _ = expected(rollout(), loss)
    assert_close(metrics["train/loss"], losses.mean())
    assert_close(metrics["train/tied_fraction"], 1 / 3)
    assert_close(metrics["reward/mean"], sum(REWARDS) / 9, atol=1e-6)
    if not loss.length_normalized:
        assert_close(metrics["train/score_margin"], 0.3 * (ratios[list(BEST)] - ratios[list(WORST)]).mean(), atol=1e-6)
        assert_close(metrics["train/loss"], -logsigmoid(0.3 * (ratios[list(BEST)] - ratios[list(WORST)])).mean())


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 1000])
def test_gradient_is_that_of_the_decided_pairs(micro_batch_tokens):
    module = online("float64", 1.0, micro_batch_tokens=micro_batch_tokens, max_grad_norm=None)
    before = [p.detach().clone() for p in module.actor.parameters()]
    made = rollout(dtype=torch.float64)
    fit(module, [made])
    taken = [old - new.detach() for old, new in zip(before, module.actor.parameters(), strict=True)]
    _, losses, actor = expected(made, DPOLoss(0.3), "float64")
    wanted = torch.autograd.grad(losses.mean(), list(actor.parameters()))
    assert max(float((one - other).abs().max()) for one, other in zip(taken, wanted, strict=True)) <= 1e-12


@pytest.mark.parametrize("left_out", [BEST[1], WORST[1]])
def test_pair_consists_of_included_responses(left_out):
    made = rollout()
    made.included[left_out] = False
    metrics = fit(online(), [made]).callback_metrics
    rows = [row for row in range(6, 9) if row != left_out]
    best, worst = max(rows, key=REWARDS.__getitem__), min(rows, key=REWARDS.__getitem__)
    ratios, losses, _ = expected(rollout(), DPOLoss(0.3))
    assert_close(metrics["train/tied_fraction"], 1 / 3)
    assert_close(metrics["train/loss"], (losses[0] + DPOLoss(0.3)(ratios[[best]], ratios[[worst]])[0]) / 2)


def test_prompt_with_one_included_response_has_no_pair():
    made = rollout()
    made.included[[BEST[1], WORST[1]]] = False
    metrics = fit(online(), [made]).callback_metrics
    assert_close(metrics["train/tied_fraction"], 2 / 3)
    assert_close(metrics["train/loss"], expected(rollout(), DPOLoss(0.3))[1][0])


def test_step_with_only_ties_changes_nothing():
    module = online(lr=1.0)
    before = [p.detach().clone() for p in module.actor.parameters()]
    metrics = fit(module, [rollout((2.0,) * 9)]).callback_metrics
    assert (metrics["train/tied_fraction"], metrics["policy/updates"]) == (1, 0)
    assert all(torch.equal(old, new) for old, new in zip(before, module.actor.parameters(), strict=True))


def test_pairs_stay_together_in_mini_batches_of_fewer_prompts():
    sizes = []

    class Watch(OnlineDPOModule):
        def denominator(self, minibatch):
            sizes.append((len(minibatch), int(minibatch.included.sum())))
            assert minibatch.first.rollout.prompt_ids.equal(minibatch.second.rollout.prompt_ids)
            assert bool(
                (minibatch.first.reward[minibatch.included] > minibatch.second.reward[minibatch.included]).all()
            )
            return super().denominator(minibatch)

    module = online(minibatch_size=3, update_epochs=2)
    module.__class__ = Watch
    metrics = fit(module, [rollout()]).callback_metrics
    assert sizes == [(1, 1)] * 4  # two of three prompts, twice
    assert metrics["policy/updates"] == 4


def test_reference_is_the_actor_without_adapters():
    module = OnlineDPOModule(TinyModel(lora=LoRA(2, alpha=4)), minibatch_size=9)
    assert (module.frozen_roles, module.has_ref) == ((), True)
    assert OnlineDPOModule(TinyModel(), minibatch_size=9).frozen_roles == ("ref",)
    assert_close(fit(module, [rollout()]).callback_metrics["train/score_margin"], 0.0, atol=1e-6)


def test_prompts_with_other_numbers_of_responses_are_rejected():
    made = rollout()
    made.group[:] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    with pytest.raises(
        ValueError, match=r"^all prompts must have the same number \(>= 2\) of responses, got \[4, 5\]$"
    ):
        fit(online(), [made])


@pytest.mark.slow
def test_short_fit_makes_better_answers_more_likely():
    metrics = fit(online(ref=None, optimizer=partial(torch.optim.AdamW, lr=1e-2)), [rollout()] * 20)
    assert metrics.callback_metrics["train/pair_accuracy"] == 1
    assert metrics.callback_metrics["train/score_margin"] > 0.5
