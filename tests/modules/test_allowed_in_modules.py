"""Log-probs over the tokens that limits allowed: those of engines, and those that the actor finds."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf import GRPOModule
from lightning_rlhf.functional.allowed_tokens import allowed_tokens
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.types import AllowedTokens, SamplingLimits
from tests.helpers import assert_close
from tests.stand_ins import Response, TinyModel, fit, responses, rollout_of

pytestmark = pytest.mark.usefixtures("exact")
SGD = partial(torch.optim.SGD, lr=1.0)  # the step is the gradient
LIMITS = SamplingLimits(top_p=0.8, top_k=5, min_p=0.05)
TEMPERATURE = 0.7


def limited(allowed=None, **changes):
    """Return a rollout of four responses to each of two prompts, which were sampled with limits."""
    rows = responses(8, seed=4, observations=True)
    rows = [Response(rows[i - i % 4].prompt, row.tokens, row.reward, row.policy) for i, row in enumerate(rows)]
    made = rollout_of(rows, dtype=torch.float64, temperature=TEMPERATURE)
    made.group[:] = torch.arange(8) // 4
    return replace(made, limits=LIMITS, allowed=allowed, **changes)


def module_of(**options):
    options = {"micro_batch_tokens": 40, "kl_loss": KLTerm(0.1, "k3"), **options}
    return GRPOModule(
        TinyModel(dtype="float64"), TinyModel(dtype="float64", seed=1), optimizer=SGD, max_grad_norm=None, **options
    )


def step(rollout, **options):
    """Return a module after one step, with its change of each weight and its metrics."""
    module = module_of(**options)
    module.configure_model()
    before = {name: value.clone() for name, value in module.actor.state_dict().items()}
    module.metrics = fit(module, [rollout]).callback_metrics
    module.changes = {name: value - before[name] for name, value in module.actor.state_dict().items()}
    return module


def expected(role, rollout, allowed=None):
    """Return the log-probs of the model of actor or ref, token by token, and the tokens that it allows."""
    lm = TinyModel(dtype="float64", seed=int(role == "ref")).causal().lm
    logprobs = torch.zeros_like(rollout.rollout_logprobs)
    found = torch.zeros(*logprobs.shape, lm.config.vocab_size, dtype=torch.bool)
    for row in range(len(rollout)):
        prompt, length = rollout.prompt_ids[row, : rollout.prompt_lengths[row]], rollout.response_lengths[row]
        ids = torch.cat([prompt, rollout.response_ids[row, :length]])
        with torch.no_grad():
            logits = lm(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        kept = allowed_tokens(logits, LIMITS).scatter(1, ids[len(prompt) :, None], True)
        kept = kept if allowed is None else allowed[row, :length]
        found[row, :length] = kept
        masked = logits.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)
        logprobs[row, :length] = masked.gather(1, ids[len(prompt) :, None]).squeeze(1)
    mask = rollout.response_mask
    return logprobs.masked_fill(~mask, 0), found & mask.unsqueeze(2)


def as_mask(allowed, vocabulary=11):
    """Return (B, T, V) whether a token is allowed; none where all are."""
    mask = torch.zeros(allowed.counts.numel(), vocabulary, dtype=torch.bool)
    mask[allowed.listed()] = True
    return mask.view(*allowed.counts.shape, vocabulary)


@pytest.mark.parametrize("packing", [True, False])
def test_actor_and_reference_are_evaluated_over_the_tokens_that_the_actor_allows(packing):
    experience = step(limited(), packing=packing).last_step.experience
    logprobs, allowed = expected("actor", experience.rollout)
    assert torch.equal(as_mask(experience.rollout.allowed), allowed)
    assert 1 < allowed.sum(dim=2)[experience.rollout.response_mask].float().mean() < 6
    assert_close(experience.old_logprobs, logprobs, atol=1e-6)
    assert_close(experience.ref_logprobs, expected("ref", experience.rollout, allowed)[0], atol=1e-6)


def test_tokens_of_the_engine_are_used_as_they_are():
    rollout = limited()
    mask = torch.rand(*rollout.response_mask.shape, 11, generator=torch.Generator().manual_seed(0)) < 0.4
    mask = mask.scatter(2, rollout.response_ids.unsqueeze(2), True) & rollout.response_mask.unsqueeze(2)
    allowed = AllowedTokens.of(mask.sum(dim=2), mask.nonzero()[:, 2])
    experience = step(replace(rollout, allowed=allowed)).last_step.experience
    assert experience.rollout.allowed == allowed
    for role, logprobs in (("actor", experience.old_logprobs), ("ref", experience.ref_logprobs)):
        assert_close(logprobs, expected(role, rollout, mask)[0], atol=1e-6)


def test_the_step_is_the_same_whether_engine_or_actor_names_the_tokens():
    found = step(limited(), minibatch_size=4, update_epochs=2)
    known = step(limited(found.last_step.experience.rollout.allowed), minibatch_size=4, update_epochs=2)
    for name, change in found.changes.items():
        assert_close(known.changes[name], change, atol=1e-9)


@pytest.mark.parametrize("options", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 1000}, {"packing": False}])
def test_the_gradient_does_not_depend_on_micro_batches_and_packing(options):
    wanted = step(limited()).changes
    for name, change in step(limited(), **options).changes.items():
        assert_close(change, wanted[name], atol=1e-6)
    assert max(float(change.abs().max()) for change in wanted.values()) > 0.01


def test_ratio_of_the_first_update_is_1_and_later_ones_keep_the_tokens():
    metrics = step(limited()).metrics
    assert metrics["kl/approx"] == 0
    later = step(limited(), update_epochs=3, minibatch_size=8)
    assert later.metrics["kl/approx"] > 0
    assert torch.isfinite(later.metrics["kl/approx"])


def test_metrics_count_the_allowed_tokens_and_those_that_were_added():
    module = step(limited())
    rollout = module.last_step.experience.rollout
    mask, allowed = rollout.response_mask, expected("actor", rollout)[1]
    assert_close(module.metrics["rollout/allowed_tokens_mean"], allowed.sum(dim=2)[mask].double().mean(), atol=1e-6)
    lm = TinyModel(dtype="float64").causal().lm
    outside = 0
    for row in range(len(rollout)):
        prompt, length = rollout.prompt_lengths[row], rollout.response_lengths[row]
        ids = torch.cat([rollout.prompt_ids[row, :prompt], rollout.response_ids[row, :length]])
        kept = allowed_tokens(lm(ids[None]).logits[0, prompt - 1 : -1].detach() / TEMPERATURE, LIMITS)
        outside += (~kept[torch.arange(length), ids[prompt:]] & mask[row, :length]).sum()
    assert outside > 0
    assert_close(module.metrics["rollout/added_token_fraction"], outside / mask.sum(), atol=1e-6)
    known = step(limited(rollout.allowed.map(lambda values: values & False if values.dtype == torch.bool else values)))
    assert known.metrics["rollout/added_token_fraction"] == 0
    plain = step(replace(limited(), limits=SamplingLimits()))
    assert "rollout/allowed_tokens_mean" not in plain.metrics


def test_given_responses_have_no_limits():
    given = torch.arange(8) % 4 == 3
    rollout = limited(is_given=given)
    experience = step(rollout).last_step.experience
    assert not experience.rollout.allowed.counts[given].any()
    assert experience.rollout.allowed.counts[~given].any()
    wide = torch.ones(*rollout.response_mask.shape, 11, dtype=torch.bool)
    assert_close(experience.old_logprobs[given], expected("actor", rollout, wide)[0][given], atol=1e-6)
    assert_close(experience.old_logprobs[~given], expected("actor", rollout)[0][~given], atol=1e-6)


def test_with_bypass_each_update_finds_the_tokens():
    module = step(limited(), correction=RolloutCorrection(bypass=True, level=None), update_epochs=2)
    experience = module.last_step.experience
    assert experience.rollout.allowed is None
    assert torch.equal(experience.old_logprobs, experience.rollout.rollout_logprobs)
    assert_close(experience.ref_logprobs, expected("ref", experience.rollout)[0], atol=1e-6)
