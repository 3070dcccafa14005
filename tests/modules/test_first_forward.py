"""The first mini-batch of a step has no separate pass for the log-probs before its update."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf import GRPOModule, PPOModule, RLHFModule
from lightning_rlhf.extras.algorithms.covariance_policy_losses import ClipCovLoss
from lightning_rlhf.extras.algorithms.response_pairs import OnlineDPOModule
from lightning_rlhf.extras.algorithms.token_baselines import OptimalTokenBaseline
from lightning_rlhf.modules.first_forward import FirstForward
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.resampling import ScoreResampling
from tests.stand_ins import TinyModel, fit, responses, rollout_of

ROWS = 8
SGD = partial(torch.optim.SGD, lr=0.1)


def rollout():
    made = rollout_of(responses(ROWS, seed=5))
    made.group[:] = torch.arange(ROWS) // 2
    return made


class Separate(RLHFModule):
    """The module with a separate pass."""

    def actor_loss(self, rows, means):
        return super().actor_loss(rows, means)


class Counted(RLHFModule):
    """Counts the forward passes of the actor."""

    passes = 0

    def actor_scores(self, role, rollout, squares=False):
        self.passes += role == "actor"
        return super().actor_scores(role, rollout, squares)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The FirstForward of each step, or None for a step with a separate pass."""
    made, old_scores = [], RLHFModule.old_scores

    def remembered(module, rollout):
        scores = old_scores(module, rollout)
        made.append(scores if isinstance(scores, FirstForward) else None)
        return scores

    monkeypatch.setattr(RLHFModule, "old_scores", remembered)
    return made


def trained(kind, **arguments):
    arguments = {"advantages": GRPO(), "minibatch_size": ROWS, "optimizer": SGD, **arguments}
    module = kind(TinyModel(), **arguments)
    trainer = fit(module, [rollout(), rollout()])
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_log_probs_before_the_update_are_those_of_its_forward_pass():
    module, metrics = trained(Counted)
    assert module.passes == 2  # one for each of two steps
    separate, expected = trained(Separate)
    torch.testing.assert_close(
        module.last_step.experience.old_logprobs, separate.last_step.experience.old_logprobs, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        module.last_step.experience.entropies, separate.last_step.experience.entropies, rtol=0, atol=1e-5
    )
    for name, value in separate.actor.state_dict().items():
        torch.testing.assert_close(module.actor.state_dict()[name], value, rtol=0, atol=1e-6)
    varying = ("time/", "perf/")
    assert metrics.keys() == expected.keys()
    for name in expected:
        if not name.startswith(varying):
            assert metrics[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4, nan_ok=True), name
    assert metrics["kl/approx"] == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kl_loss", [KLTerm(0.0), KLTerm(0.1, "k3")], ids=["no KL", "KL loss"])
def test_several_micro_batches_and_a_reference_are_supported(kl_loss, made):
    options = {"kl_loss": kl_loss, "ref": TinyModel(seed=1), "micro_batch_tokens": 16}
    module, metrics = trained(RLHFModule, **options)
    assert len(made[-1].logprobs) > 1
    separate, expected = trained(Separate, **options)
    assert made[-1] is None
    torch.testing.assert_close(
        module.last_step.experience.old_logprobs, separate.last_step.experience.old_logprobs, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        module.last_step.experience.entropies, separate.last_step.experience.entropies, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        module.last_step.experience.ref_logprobs, separate.last_step.experience.ref_logprobs, rtol=0, atol=1e-5
    )
    for name in ("rollout_corr/kl_k1", "rollout/logprob_diff_max", "loss/policy", "grad_norm/actor"):
        assert metrics[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name
    if kl_loss.coef:
        assert metrics["kl/ref"] == pytest.approx(expected["kl/ref"], rel=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("keep_groups", [False, True])
@pytest.mark.parametrize("size", [4, 3, 2])
def test_rows_of_later_mini_batches_have_a_separate_pass(size, keep_groups, made):
    options = {"minibatch_size": size, "keep_groups": keep_groups, "micro_batch_tokens": 24}
    module, metrics = trained(RLHFModule, **options)
    assert len(made[-1].first) == size
    separate, expected = trained(Separate, **options)
    torch.testing.assert_close(
        module.last_step.experience.old_logprobs, separate.last_step.experience.old_logprobs, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        module.last_step.experience.entropies, separate.last_step.experience.entropies, rtol=0, atol=1e-5
    )
    for name, value in separate.actor.state_dict().items():
        torch.testing.assert_close(module.actor.state_dict()[name], value, rtol=0, atol=1e-6)
    for name in ("rollout_corr/kl_k1", "rollout/logprob_diff_max", "kl/approx", "policy/clip_fraction"):
        assert metrics[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name
    assert metrics["kl/approx"] > 0


def test_separate_pass_omits_the_rows_of_the_first_mini_batch():
    class Rows(RLHFModule):
        evaluated = 0

        def actor_scores(self, role, rollout, squares=False):
            if not torch.is_grad_enabled():
                self.evaluated += len(rollout)
            return super().actor_scores(role, rollout, squares)

    module, _ = trained(Rows, minibatch_size=2)
    assert module.evaluated == 2 * (ROWS - 2)  # in two steps


class OwnRows(RLHFModule):
    def select_training_rows(self, experience):
        return experience


class OwnRowsOfPPO(PPOModule):
    def select_training_rows(self, experience):
        return experience


class OwnRewards(RLHFModule):
    def token_rewards(self, rollout, reward, logprobs, ref_logprobs):
        return super().token_rewards(rollout, reward, logprobs, ref_logprobs)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (RLHFModule, {"update_epochs": 2}),
        (RLHFModule, {"kl_reward": KLTerm(0.1)}),
        (RLHFModule, {"correction": RolloutCorrection("token")}),
        (RLHFModule, {"correction": RolloutCorrection(bypass=True)}),
        (RLHFModule, {"advantages": OptimalTokenBaseline()}),
        (RLHFModule, {"policy_loss": ClipCovLoss()}),
        (Separate, {}),
        (OwnRows, {}),
        (OwnRewards, {}),
    ],
    ids=str,
)
def test_other_steps_have_a_separate_pass_for_all_rows(kind, arguments, made):
    trained(kind, **arguments)
    assert made == [None, None]


def test_modules_with_other_losses_or_resampled_responses_have_a_separate_pass(made):
    for module in (
        OnlineDPOModule(TinyModel(), minibatch_size=ROWS),
        PPOModule(TinyModel(), minibatch_size=ROWS, resampling=ScoreResampling()),
        PPOModule(TinyModel(), minibatch_size=ROWS, critic_warmup_steps=9),
        OwnRowsOfPPO(TinyModel(), minibatch_size=ROWS),
    ):
        fit(module, [rollout()])
    assert not any(made)


@pytest.mark.parametrize("fault", ["numbers that several rows have", "nothing to learn from first"])
def test_unsuitable_rollouts_have_a_separate_pass(fault, made):
    inputs = rollout()
    if fault.startswith("numbers"):
        inputs.position[1] = inputs.position[0]
    else:
        inputs.included[:] = False
    fit(RLHFModule(TinyModel(), advantages=GRPO(), minibatch_size=4, optimizer=SGD), [inputs])
    assert made == [None]


def test_losses_of_subclasses_get_the_recorded_log_probs():
    class Weighted(RLHFModule):
        seen = ()

        def importance_weights(self, logprobs, rows, means):
            self.seen = (*self.seen, float((logprobs.detach() - rows.old_logprobs).abs().max()))
            return super().importance_weights(logprobs, rows, means)

    module, _ = trained(Weighted)
    assert module.seen == (0.0, 0.0)


def test_critic_of_ppo_does_not_prevent_it(made):
    fit(PPOModule(TinyModel(), minibatch_size=ROWS), [rollout()])
    assert made[0] is not None


def test_preset_with_one_update_uses_it(made):
    fit(GRPOModule(TinyModel(), minibatch_size=ROWS), [rollout()])
    assert made[0] is not None


def test_responses_without_trained_tokens_keep_the_metrics_of_the_rollout():
    empty = replace(rollout(), included=torch.zeros(ROWS, dtype=torch.bool))
    module = RLHFModule(TinyModel(), minibatch_size=ROWS, optimizer=SGD)
    fit(module, [empty])
    assert module.last_step.actor_updates == 0
