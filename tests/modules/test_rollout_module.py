"""From a rollout to an experience: each part compared with direct calls of the models."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import PPOModule, ReMaxModule, RLHFModule
from lightning_rlhf.extras.algorithms.token_baselines import OptimalTokenBaseline
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.aggregation import TokenMean
from lightning_rlhf.objectives.base import PolicyLoss
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.policy_losses import ReinforceLoss
from lightning_rlhf.objectives.rejections import Rejection
from lightning_rlhf.objectives.resampling import ScoreResampling
from lightning_rlhf.types import StepRollout
from tests.helpers import assert_close
from tests.stand_ins import Response, TinyModel, fit, responses, rollout_of

pytestmark = pytest.mark.usefixtures("exact")
SGD = partial(torch.optim.SGD, lr=0.0)
ROWS = responses(6, seed=8, observations=True)


def stepped(kind=RLHFModule, rollout=None, **options):
    """Return a module after a step that changed no weight."""
    options = {"optimizer": SGD, "minibatch_size": 3, "micro_batch_tokens": 15} | options
    module = kind(TinyModel(dtype="float64"), **options)
    module.metrics = fit(module, [rollout or rollout_of(ROWS, dtype=torch.float64)]).callback_metrics
    return module


def logits_of(lm, row):
    ids = torch.tensor(row.prompt + row.tokens)
    return lm(ids[None]).logits[0, len(row.prompt) - 1 : -1]


def test_excluded_responses_are_measured_and_not_trained_on():
    rollout = rollout_of(ROWS, dtype=torch.float64)
    rollout.included[1::2] = False
    module = stepped(rollout=rollout)
    experience = module.last_step.experience
    assert torch.equal(experience.mask[::2], rollout.response_mask[::2])
    assert not experience.mask[1::2].any()
    assert not experience.advantages[1::2].any()
    assert_close(module.metrics["reward/mean"], rollout.reward.mean(), atol=1e-6)
    # the same as a rollout of the kept ones alone
    alone = stepped(rollout=rollout[[0, 2, 4]]).last_step.experience
    width = alone.advantages.shape[1]
    assert_close(experience.advantages[::2, :width], alone.advantages)


def test_weights_and_rejections_are_those_of_the_correction_before_the_first_update():
    correction = RolloutCorrection("token", 1.5, rejections=(Rejection("k1", "token", upper=3.0, lower=0.2),))
    module = stepped(correction=correction)
    experience, rollout = module.last_step.experience, module.last_step.experience.rollout
    weights, saved, metrics = correction(experience.old_logprobs, rollout.rollout_logprobs, rollout.response_mask)
    assert 0 < saved.sum() < rollout.response_mask.sum()
    assert torch.equal(experience.weights, weights)
    assert torch.equal(experience.mask, saved)
    for name, value in metrics.items():
        assert_close(module.metrics[name], value, equal_nan=True)


def test_rejected_last_token_does_not_remove_the_reward_of_its_response():
    rollout = rollout_of(ROWS, dtype=torch.float64)
    plain = stepped(rollout=rollout).last_step.experience
    rollout = replace(rollout, rollout_logprobs=plain.old_logprobs.clone())
    last = [len(row.tokens) - 1 for row in ROWS]
    rollout.rollout_logprobs[range(len(ROWS)), last] += 5.0  # train / rollout is exp(-5) there
    correction = RolloutCorrection(rejections=(Rejection("k1", "token", upper=3.0, lower=0.2),))
    experience = stepped(rollout=rollout, correction=correction).last_step.experience
    rejected = rollout.response_mask & ~experience.mask
    assert rejected.sum() == len(ROWS)
    assert torch.equal(experience.advantages, plain.advantages.masked_fill(rejected, 0))
    assert experience.advantages.any()


def test_mismatch_is_measured_without_a_correction():
    module = stepped()
    rollout = module.last_step.experience.rollout
    gap = (module.last_step.experience.old_logprobs - rollout.rollout_logprobs)[rollout.response_mask]
    assert_close(module.metrics["rollout_corr/kl_k1"], -gap.mean())
    assert torch.equal(module.last_step.experience.weights, rollout.response_mask.double())
    assert torch.equal(module.last_step.experience.mask, rollout.response_mask)


def test_weights_multiply_only_the_policy_loss():
    module = stepped(ent_coef=0.0, policy_loss=ReinforceLoss(), aggregation=TokenMean())
    experience = module.last_step.experience
    once, twice = (
        module.actor_loss(replace(experience, weights=torch.full_like(experience.weights, w)), MeanAccumulator())
        for w in (1.0, 2.0)
    )
    assert once.abs() > 1e-3
    assert_close(twice, 2 * once)
    module.ent_coef = 0.3
    entropy = once - module.actor_loss(
        replace(experience, weights=torch.ones_like(experience.weights)), MeanAccumulator()
    )
    unweighted = twice - module.actor_loss(
        replace(experience, weights=torch.full_like(experience.weights, 2.0)), MeanAccumulator()
    )
    assert entropy > 0.1
    assert_close(entropy, unweighted)


class Counting(RLHFModule):
    """Counts the evaluations of the actor outside of updates."""

    requested = 0

    def actor_scores(self, role, rollout, squares=False):
        self.requested += not torch.is_grad_enabled()
        return super().actor_scores(role, rollout, squares)


def test_bypass_uses_the_log_probabilities_of_the_engine_without_a_forward_pass():
    bypass = stepped(Counting, correction=RolloutCorrection(bypass=True))
    assert bypass.requested == 0
    assert torch.equal(bypass.last_step.experience.old_logprobs, bypass.last_step.experience.rollout.rollout_logprobs)
    decoupled = stepped(Counting)
    assert decoupled.requested > 0
    # these metrics measure the trained actor, which has not changed here
    for name in ("rollout_corr/kl_k1", "rollout_corr/kl_k3"):
        assert_close(bypass.metrics[name], decoupled.metrics[name], atol=1e-6)
    for name in ("rollout_corr/ess_token", "rollout/logprob_diff_max"):
        assert name in decoupled.metrics
        assert name not in bypass.metrics


def test_bypass_weights_the_policy_gradient_by_the_current_actor():
    correction = RolloutCorrection("token", 1.5, bypass=True)
    module = stepped(correction=correction, policy_loss=ReinforceLoss())
    rows = module.last_step.experience
    logprobs = module.actor_scores("actor", rows.rollout).logprobs.detach()
    weights = (logprobs - rows.rollout.rollout_logprobs).exp().clamp(max=1.5)
    expected = (-rows.advantages * logprobs * weights)[rows.mask].sum()
    assert_close(module.actor_loss(rows, MeanAccumulator()), expected)


def test_values_after_the_last_token_of_truncated_responses_are_those_of_the_critic():
    seen = []

    class Watching(GAE):
        def __call__(self, inputs, ranks):
            seen.append(inputs.final_values)
            return super().__call__(inputs, ranks)

    module = stepped(
        PPOModule,
        advantages=Watching(bootstrap_truncated=True),
        critic=TinyModel(seed=5, dtype="float64"),
        critic_optimizer=SGD,
    )
    lm = module.critic.lm
    for row, value in zip(ROWS, seen[0], strict=True):
        ids = torch.tensor(row.prompt + row.tokens)
        behind = lm.score(lm.model(ids[None]).last_hidden_state)[0, -1, 0]
        assert_close(value, behind if row.truncated else 0.0, atol=1e-6)
    assert any(row.truncated for row in ROWS)


def test_sum_of_squared_probabilities_reaches_the_estimator_that_requests_it():
    seen = []

    class Watching(OptimalTokenBaseline):
        def __call__(self, inputs, ranks):
            seen.append(inputs)
            return super().__call__(inputs, ranks)

    rollout = rollout_of(ROWS, dtype=torch.float64)
    rollout.group[:] = 0
    module = stepped(rollout=rollout, advantages=Watching())
    for i, row in enumerate(ROWS):
        squares = (logits_of(module.actor.lm, row).softmax(-1) ** 2).sum(-1)
        instance = torch.tensor(row.mask)
        assert_close(seen[0].sum_pi_squared[i, : len(row.tokens)][instance], squares[instance], atol=1e-6)


def test_greedy_reward_is_that_of_functions_and_reward_model_for_the_greedy_response():
    rollout = rollout_of(ROWS, dtype=torch.float64)
    rollout.group[:] = torch.tensor([0, 0, 0, 1, 1, 1])
    greedy_rows = [Response([1, 2], [3], 0.5), Response([4], [5, 6], -1.0)]

    class GivesBoth(ReMaxModule):
        def receive(self, inputs):
            super().receive(StepRollout(inputs, rollout_of(greedy_rows, dtype=torch.float64)))

    module = stepped(GivesBoth, rollout=rollout, reward_model=TinyModel(seed=6, dtype="float64"))
    lm = module.reward_model.lm
    for i in range(len(ROWS)):
        greedy = greedy_rows[int(rollout.group[i])]
        score = lm.score(lm.model(torch.tensor([greedy.prompt + greedy.tokens])).last_hidden_state)[0, -1, 0]
        expected = module.last_step.experience.reward[i] - (greedy.reward + score)
        instance = module.last_step.experience.mask[i]
        assert_close(
            module.last_step.experience.advantages[i][instance], expected.expand(int(instance.sum())), atol=1e-6
        )


def test_resampled_responses_are_drawn_by_reward_and_equal_after_a_resume():
    rows = [Response([1], [2, 3], reward) for reward in (0.0, 0.0, 3.0, 0.0)]

    class Recorded(PPOModule):
        def minibatches(self, experience):
            self.drawn = []
            for minibatch in super().minibatches(experience):
                self.drawn += minibatch.rollout.policy_version.amax(dim=1).tolist()
                yield minibatch

    options = {"rollout": rollout_of(rows, dtype=torch.float64), "minibatch_size": 2, "critic_optimizer": SGD}
    first, again = (stepped(Recorded, resampling=ScoreResampling("pow"), **options) for _ in range(2))
    assert first.drawn == again.drawn == [2, 2, 2, 2]
    assert sorted(stepped(Recorded, **options).drawn) == [0, 1, 2, 3]


def test_target_kl_stops_a_loss_without_a_kl():
    class Silent(PolicyLoss):
        def token_losses(self, tokens):
            return -tokens.advantages * (tokens.logprobs - tokens.old_logprobs).exp(), {}

    options = {"policy_loss": Silent(), "optimizer": partial(torch.optim.SGD, lr=0.5), "update_epochs": 4}
    assert stepped(**options).metrics["policy/updates"] == 8
    # before the second mini-batch's update the actor has moved; that update is still made
    assert stepped(**options, target_kl=1e-9).metrics["policy/updates"] == 2


def test_target_kl_with_a_loss_without_kl_is_rejected_with_the_module_name():
    class Own(RLHFModule):
        def losses(self):
            return {
                "actor": lambda rows, sums: self.aggregated(self.actor_scores("actor", rows.rollout).logprobs, rows)
            }

    assert stepped(Own, update_epochs=2).metrics["policy/updates"] == 4
    with pytest.raises(
        RuntimeError, match=r"target_kl is 1e-09, but the actor's loss of Own does not measure a KL: call means"
    ):
        stepped(Own, update_epochs=2, target_kl=1e-9)


def test_metrics_of_a_step_without_updates_are_nan():
    good = rollout_of(ROWS, dtype=torch.float64)
    nothing = replace(good, included=torch.zeros_like(good.included))
    seen = []

    class Recorded(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    module = RLHFModule(TinyModel(), minibatch_size=3, correction=RolloutCorrection())
    fit(module, [good, nothing, good], callbacks=[Recorded()])
    first, second, third = seen
    assert first.keys() == second.keys() == third.keys()
    of_updates = {"kl/approx", "loss/policy", "policy/entropy", "policy/clip_fraction", "grad_norm/actor"}
    assert of_updates <= {name for name, value in second.items() if math.isnan(value)}
    for name in of_updates:
        assert math.isfinite(first[name]), name
        assert math.isfinite(third[name]), name
    assert second["policy/updates"] == 0


def test_rejections_in_bypass_mode_are_logged():
    rejections = (Rejection("k1", "sequence_mean", upper=1.001, lower=0.999),)
    decoupled, bypass = (
        stepped(
            policy_loss=ReinforceLoss(), correction=RolloutCorrection("token", rejections=rejections, bypass=bypass)
        )
        for bypass in (False, True)
    )
    for name in ("rollout_corr/rejected_fraction", "rollout_corr/weight_mean"):
        assert_close(bypass.metrics[name], decoupled.metrics[name], atol=1e-6)
    assert bypass.metrics["rollout_corr/rejected_fraction"] == 1


def test_resampling_draws_only_included_responses():
    drawn = []

    class Recorded(PPOModule):
        def minibatches(self, experience):
            for minibatch in super().minibatches(experience):
                drawn.extend(minibatch.rollout.policy_version.amax(dim=1).tolist())
                yield minibatch

    rollout = rollout_of([Response([1], [2, 3], reward) for reward in (1.0, 1.0, 0.0, 0.1)], dtype=torch.float64)
    rollout.included[:2] = False
    stepped(Recorded, rollout=rollout, minibatch_size=2, critic_optimizer=SGD, resampling=ScoreResampling("max_min"))
    assert len(drawn) == 4
    assert set(drawn) <= {2, 3}


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_unsupported_precisions_are_rejected(precision):
    with pytest.raises(
        ValueError, match=f"^precision must be 32-true or bf16-mixed, got {precision}: bf16-mixed computes in bfloat16"
    ):
        fit(RLHFModule(TinyModel(), minibatch_size=3), [rollout_of(ROWS)], precision=precision)


def test_responses_of_an_own_loop_are_one_update_by_default():
    module = stepped(minibatch_size=None)
    assert (module.minibatch_size, module.last_step.actor_updates) == (len(ROWS), 1)
    assert stepped().last_step.actor_updates == 2
