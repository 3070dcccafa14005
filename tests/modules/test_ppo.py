"""Parts of PPOModule, tested through whole steps with a real Trainer."""

import logging
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_rlhf import PPOModule
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ClippedPolicyLoss
from lightning_rlhf.strategies.roles import RoleStrategy
from tests.helpers import assert_close, over_ranks
from tests.stand_ins import TINY_LLAMA, OneOfTwoRanks, Response, TinyModel, fit, quiet_trainer, responses, rollout_of

SGD = partial(torch.optim.SGD, lr=0.05)
ROWS = responses(8, seed=5)


def ppo(dtype="float64", **options):
    """Return a module with built models: actor and critic of different weights, plain gradient descent."""
    defaults = {"critic": TinyModel(seed=1, dtype=dtype), "optimizer": SGD, "critic_optimizer": SGD}
    module = PPOModule(TinyModel(dtype=dtype), **(defaults | {"minibatch_size": 4} | options))
    module.configure_model()
    return module


def weights(module, role):
    return [parameter.detach().clone() for parameter in getattr(module, role).parameters()]


def distance(ones, others):
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True))


def rollout(rows=ROWS, **options):
    return rollout_of(rows, dtype=torch.get_default_dtype(), **options)


# -- rewards and values -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact")
def test_reward_model_scores_the_last_token_of_the_whole_response():
    module = ppo(reward_model=TinyModel(seed=2, dtype="float64"))
    fit(module, [rollout(extra_columns=3)])
    lm = module.reward_model.lm
    for row, inputs in zip(ROWS, module.last_step.experience.token_rewards, strict=True):
        ids = torch.tensor([row.prompt + row.tokens])
        score = lm.score(lm.model(ids).last_hidden_state)[0, -1, 0]
        expected = torch.zeros_like(inputs)
        expected[len(row.tokens) - 1] = row.reward + score
        assert_close(inputs, expected)


@pytest.mark.usefixtures("exact")
def test_reward_of_a_response_that_ends_with_environment_text_belongs_to_the_last_policy_token():
    rows = [
        Response([3, 4], [5, 6, 7, 8], 2.0, [True, True, False, False]),
        Response([3], [5, 6, 7], -1.0, [True, False, True]),
    ]
    module = ppo(minibatch_size=2, advantages=GAE(gae_lambda=1.0, whiten=False))
    fit(module, [rollout(rows)])
    assert_close(module.last_step.experience.token_rewards, [[0, 2, 0, 0], [0, 0, -1, 0]])
    # with lambda 1 and gamma 1 every token of the policy returns the whole reward
    assert_close(module.last_step.experience.returns, [[2, 2, 0, 0], [-1, 0, -1, 0]])


@pytest.mark.usefixtures("exact")
def test_value_of_a_token_is_computed_before_it_is_known():
    module = ppo()
    fit(module, [rollout()])
    before = TinyModel(seed=1, dtype="float64").scalar().lm
    for row, values in zip(ROWS, module.last_step.experience.values, strict=True):
        ids = torch.tensor([row.prompt + row.tokens])
        every = before.score(before.model(ids).last_hidden_state)[0, :, 0]
        assert_close(values[: len(row.tokens)], every[len(row.prompt) - 1 : -1])
        assert not values[len(row.tokens) :].any()


@pytest.mark.usefixtures("exact")
def test_environment_tokens_are_not_trained_on():
    """They only serve as context: another reward or old log-probability at them changes nothing."""
    rows = responses(8, seed=5, observations=True)
    assert any(not all(row.mask) for row in rows)

    class Disturbed(PPOModule):
        def evaluate(self, received):
            evaluation = super().evaluate(received)
            experience = evaluation.experience
            noise = torch.full_like(experience.values, 3.0).masked_fill(experience.mask, 0)
            names = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")
            changed = replace(experience, **{name: getattr(experience, name) + noise for name in names})
            return replace(evaluation, experience=changed)

    results = []
    for kind in (PPOModule, Disturbed):
        options = {"optimizer": SGD, "critic_optimizer": SGD, "kl_loss": KLTerm(0.1, "k3"), "ent_coef": 0.1}
        module = kind(TinyModel(dtype="float64"), minibatch_size=4, update_epochs=2, **options)
        fit(module, [rollout(rows)])
        results.append(weights(module, "actor") + weights(module, "critic"))
    assert distance(*results) == 0


# -- the reference ----------------------------------------------------------------------------------------------------


# With kl_loss, the actor's log-probs are those of the first update, whose texts share other calls of attention.
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("term", "rounding"), [("kl_reward", 0.0), ("kl_loss", 1e-14)])
def test_kl_to_a_reference_of_the_same_source_is_0_at_the_first_step(term, rounding):
    module = ppo(**{term: KLTerm(0.1, "k3")})
    trainer = fit(module, [rollout()])
    experience = module.last_step.experience
    assert_close(experience.old_logprobs, experience.ref_logprobs, rtol=0, atol=rounding)
    assert abs(trainer.callback_metrics["kl/ref"]) <= rounding


def test_reference_is_loaded_only_if_it_is_needed():
    assert ppo().frozen_roles == ()
    assert ppo(ref=TinyModel(seed=3)).frozen_roles == ()
    assert ppo(kl_reward=KLTerm(0.1)).frozen_roles == ("ref",)
    assert ppo(kl_loss=KLTerm(0.1, "k2")).frozen_roles == ("ref",)


def test_kl_per_response_in_nats_is_measured_to_the_reference():
    module = ppo("float32", kl_reward=KLTerm(0.1), ref=TinyModel(seed=3))
    trainer = fit(module, [rollout()])
    difference = module.last_step.experience.old_logprobs - module.last_step.experience.ref_logprobs
    assert_close(trainer.callback_metrics["kl/ref"], difference.sum(dim=1).mean())
    assert difference.abs().max() > 0.1


def test_coefficient_of_the_penalty_can_be_changed_between_steps():
    module = ppo("float32", kl_reward=KLTerm(0.1), ref=TinyModel(seed=3))
    module.kl_coef = 0.5
    fit(module, [rollout([replace(row, reward=0.0) for row in ROWS])])
    experience = module.last_step.experience
    assert_close(experience.token_rewards, -0.5 * (experience.old_logprobs - experience.ref_logprobs))


def test_frozen_roles_do_not_change_bitwise():
    module = ppo("float32", kl_reward=KLTerm(0.1), ref=TinyModel(seed=3), reward_model=TinyModel(seed=2))
    frozen = {role: weights(module, role) for role in ("ref", "reward_model")}
    trained = {role: weights(module, role) for role in ("actor", "critic")}
    fit(module, [rollout(), rollout()])
    for model in (module.ref, module.reward_model):
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(distance(before, weights(module, role)) == 0 for role, before in frozen.items())
    assert all(distance(before, weights(module, role)) > 0 for role, before in trained.items())


# -- when to stop and when to start -----------------------------------------------------------------------------------


def test_actor_does_not_change_during_the_warm_up_of_the_critic():
    module = ppo("float32", critic_warmup_steps=2)
    actor, critic = weights(module, "actor"), weights(module, "critic")
    trainer = fit(module, [rollout(), rollout()])
    assert distance(actor, weights(module, "actor")) == 0
    assert distance(critic, weights(module, "critic")) > 0
    assert "loss/policy" not in trainer.callback_metrics
    assert trainer.callback_metrics["policy/updates"] == 0


def test_actor_trains_after_the_warm_up():
    module = ppo("float32", critic_warmup_steps=2)
    actor = weights(module, "actor")
    fit(module, [rollout()] * 3)
    assert distance(actor, weights(module, "actor")) > 0


class Counting(PPOModule):
    """Counts the optimizer steps of each role."""

    def update(self, role, *arguments, **options):
        self.updates = [*getattr(self, "updates", []), role]
        return super().update(role, *arguments, **options)


def counting(target_kl, rate, **options):
    fast = partial(torch.optim.SGD, lr=rate)
    module = Counting(TinyModel(), minibatch_size=4, update_epochs=4, target_kl=target_kl, optimizer=fast, **options)
    module.configure_model()
    return module


def test_updates_stop_when_the_policy_exceeds_the_target_kl():
    free, held = counting(None, 0.5), counting(0.01, 0.5)
    logged = [fit(module, [rollout()]).callback_metrics["policy/updates"] for module in (free, held)]
    assert logged == [8, 2]
    assert free.updates == ["critic", "actor"] * 8
    # the first update starts from the old policy itself, so the second is the first that can have exceeds_target_kl
    assert held.updates == ["critic", "actor"] * 2


def test_policy_within_the_target_kl_is_not_stopped_and_each_rollout_starts_again():
    module = counting(0.01, 1e-5)
    fit(module, [rollout()] * 2)
    assert module.updates == ["critic", "actor"] * 16
    again = counting(0.01, 0.5)
    fit(again, [rollout()] * 2)
    assert again.updates == ["critic", "actor"] * 4


def test_target_kl_exceeded_on_one_rank_stops_both_after_the_same_update():
    """The second rank would continue on its own, because equal rewards give it nothing to learn."""
    dull = [replace(row, reward=0.0) for row in ROWS]
    shares = (ROWS, dull)
    zeros = partial(torch.optim.SGD, lr=0.0)
    options = {"critic_optimizer": zeros, "advantages": GAE(whiten=False), "max_grad_norm": None}

    class OwnGradients(OneOfTwoRanks):
        """A rank with separate gradients, so that the policy changes on one rank only."""

        gradient_scale = 1.0

        def accumulate(self, name, sync):
            return RoleStrategy.accumulate(self, name, sync)

    alone = counting(0.01, 0.3, critic=FromConfig(dict(TINY_LLAMA), seed=1), **options)
    fit(alone, [rollout(dull)])
    assert len(alone.updates) == 16

    modules = [counting(0.01, 0.3, critic=FromConfig(dict(TINY_LLAMA), seed=1), **options) for _ in shares]

    def rank(number, ranks):
        fit(modules[number], [rollout(shares[number])], strategy=OwnGradients(ranks))
        return modules[number].updates

    first, second = over_ranks(*(partial(rank, number) for number in (0, 1)))
    assert first == second
    assert len(first) < 16


def test_parameter_emptied_by_zero_counts_with_its_full_size():
    """ZeRO-3 empties parameters between two forward passes."""
    module = PPOModule(TinyModel())
    module.configure_model()
    before = module.parameter_counts()
    weight = module.actor.lm.get_output_embeddings().weight
    weight.ds_numel, weight.data = weight.numel(), torch.empty(0)
    assert module.parameter_counts() == before


@pytest.mark.usefixtures("exact")
def test_two_ranks_take_the_step_of_one_rank_with_all_rows():
    """Advantages are whitened over both ranks, and every mean is over both, although their token counts differ."""
    shares = ROWS[:4], ROWS[4:]
    assert len({sum(len(row.tokens) for row in share) for share in shares}) == 2
    options = {"update_epochs": 2, "kl_reward": KLTerm(0.1), "ref": TinyModel(seed=3, dtype="float64")}
    alone = ppo(minibatch_size=8, **options)
    logged = fit(alone, [rollout()]).callback_metrics
    modules = [ppo(minibatch_size=4, micro_batch_tokens=9, **options) for _ in shares]

    def rank(number, ranks):
        trainer = fit(modules[number], [rollout(shares[number])], strategy=OneOfTwoRanks(ranks))
        return trainer.callback_metrics

    for metrics, module in zip(over_ranks(*(partial(rank, i) for i in (0, 1))), modules, strict=True):
        for role in ("actor", "critic"):
            assert distance(weights(module, role), weights(alone, role)) <= 1e-9
        for name, value in logged.items():
            if not name.startswith(("time/", "perf/")):
                assert_close(metrics[name], value, atol=1e-6, equal_nan=True)


# -- where the critic comes from --------------------------------------------------------------------------------------


def backbone(model):
    return model.lm.base_model.state_dict()


def same_backbone(one, other):
    return all(torch.equal(value, backbone(other)[name]) for name, value in backbone(one).items())


def test_critic_starts_from_the_reward_model_if_there_is_one():
    module = ppo("float32", critic=None, reward_model=TinyModel(seed=2))
    assert same_backbone(module.critic, module.reward_model)
    assert torch.equal(module.critic.lm.score.weight, module.reward_model.lm.score.weight)
    assert module.critic.lm.score.weight is not module.reward_model.lm.score.weight
    assert all(parameter.requires_grad for parameter in module.critic.parameters())


@pytest.mark.parametrize("options", [{}, {"critic": "actor"}, {"critic": "actor", "reward_model": TinyModel(seed=2)}])
def test_critic_starts_from_the_actor_otherwise_or_if_configured(options):
    module = PPOModule(FromConfig(dict(TINY_LLAMA), seed=0), **options)
    module.configure_model()
    assert same_backbone(module.critic, module.actor)
    assert not module.critic.lm.score.weight.any()


def test_critic_can_have_a_separate_source():
    module = ppo("float32", critic=TinyModel(seed=9), reward_model=TinyModel(seed=2))
    assert torch.equal(module.critic.lm.score.weight, TinyModel(seed=9).scalar().lm.score.weight)


def test_critic_from_a_missing_reward_model_is_rejected():
    with pytest.raises(ValueError, match=r"^critic: reward_model needs a reward_model to start from; give one, or set"):
        PPOModule(TinyModel(), critic="reward_model")


# -- under the Trainer ------------------------------------------------------------------------------------------------


def test_step_is_one_rollout_for_any_number_of_optimizer_steps():
    rates = {"actor": [], "critic": []}

    class Watch(PPOModule):
        def finish_step(self, metrics, bar):
            super().finish_step(metrics, bar)
            for role, seen in rates.items():
                seen.append(metrics[f"lr/{role}"])

    module = Watch(
        TinyModel(),
        minibatch_size=2,
        update_epochs=3,
        optimizer=SGD,
        critic_optimizer=partial(torch.optim.SGD, lr=0.04),
        lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    )
    assert fit(module, [rollout()] * 3).global_step == 3
    assert rates == {"actor": [0.05, 0.025, 0.0125], "critic": [0.04, 0.04, 0.04]}


def test_max_steps_counts_rollouts():
    assert fit(ppo("float32", update_epochs=2), [rollout()] * 5, max_steps=2, max_epochs=-1).global_step == 2


def test_each_epoch_uses_every_response_once_in_a_different_order():
    orders = []

    class Watch(PPOModule):
        def minibatches(self, experience):
            for minibatch in super().minibatches(experience):
                orders.append(minibatch.rollout.policy_version.amax(dim=1).tolist())
                yield minibatch

    fit(Watch(TinyModel(), minibatch_size=3, update_epochs=2), [rollout()] * 2)
    assert [len(rows) for rows in orders] == [3, 3, 2] * 4
    epochs = [[row for rows in orders[i : i + 3] for row in rows] for i in range(0, 12, 3)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_order_depends_only_on_the_run_seed(monkeypatch):
    def result(seed):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        torch.rand(3)
        module = ppo("float32")
        fit(module, [rollout()])
        return weights(module, "actor")

    first = result(1)
    assert distance(first, result(1)) == 0
    assert distance(first, result(2)) > 0


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_module_without_a_rollout_callback_raises_before_any_model_is_loaded(method):
    module = PPOModule(TinyModel())
    with pytest.raises(ValueError, match=r"^PPOModule trains on rollouts, and no callback provides them: add "):
        getattr(quiet_trainer(), method)(module, DataLoader([rollout()], batch_size=None))
    assert not module.built


def test_step_without_a_rollout_raises_with_instructions():
    module = ppo("float32")
    module.receive = lambda inputs: None
    message = "PPOModule has no rollout for this batch: a callback must call receive() before"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fit(module, [rollout()])


def test_rollout_is_trained_on_once():
    module = ppo("float32")
    fit(module, [rollout()])
    with pytest.raises(RuntimeError, match="no rollout for this batch"):
        module.pop_rollout()


def test_models_of_different_vocabularies_are_rejected_before_any_is_loaded():
    module = PPOModule(TinyModel(), reward_model=FromConfig(TINY_LLAMA | {"vocab_size": 12}))
    with pytest.raises(
        ValueError,
        match=r"^vocabulary sizes differ \(the reward_model 12, the actor 11\), and there is no tokenizer to compare",
    ):
        fit(module, [rollout()])
    assert not module.built


@pytest.mark.parametrize(
    ("term", "warnings"), [(KLTerm(0.1, "k1"), 1), (KLTerm(0.1, "k2"), 0), (KLTerm(0.1, "k3"), 0), (KLTerm(0.0), 0)]
)
def test_kl_loss_whose_expected_gradient_is_zero_warns_once(term, warnings, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    fit(ppo("float32", kl_loss=term, kl_reward=KLTerm(0.1)), [rollout()] * 2)
    output = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert output == ["kl_loss with estimator k1 has no effect: its expected gradient is zero. Use k2 or k3"] * warnings


def test_kl_loss_whose_first_gradient_is_a_rounding_error_warns(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lightning_rlhf"), "propagate", True)
    ppo("float32", kl_loss=KLTerm(0.1, "abs"))
    (output,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert output.startswith("kl_loss with estimator abs has the sign of a rounding error as gradient where actor and")
    caplog.clear()
    ppo("float32", kl_loss=KLTerm(0.1, "abs+"), kl_reward=KLTerm(0.1, "abs"))
    assert not caplog.records


@pytest.mark.parametrize("reward_model", [None, TinyModel(seed=2)], ids=["functions only", "with reward model"])
def test_reward_that_is_not_finite_ends_the_run_before_any_weight_changes(reward_model):
    module = ppo("float32", reward_model=reward_model)
    before = {role: weights(module, role) for role in ("actor", "critic")}
    rewards = torch.zeros(8)
    rewards[3] = torch.inf
    poisoned = replace(rollout(), reward=rewards)
    with pytest.raises(
        FloatingPointError, match=r"^rewards, advantages or returns of \d responses are not finite at step"
    ):
        fit(module, [poisoned])
    assert all(distance(before[role], weights(module, role)) == 0 for role in before)


@pytest.mark.parametrize("score", [torch.nan, torch.inf])
def test_score_that_is_not_finite_ends_the_run_before_any_weight_changes(score):
    module = ppo("float32", reward_model=TinyModel(seed=2))
    module.scores = lambda rollout: torch.full((len(rollout),), score)
    before = {role: weights(module, role) for role in ("actor", "critic")}
    with pytest.raises(FloatingPointError, match=r"^a score of the reward model is not finite"):
        fit(module, [rollout()])
    assert all(distance(before[role], weights(module, role)) == 0 for role in before)


def test_reward_of_a_response_that_is_not_in_the_loss_may_be_missing():
    made = rollout()
    made.included[3] = False
    made.reward[3] = torch.nan
    fit(ppo("float32"), [made])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_epochs": 0}, "update_epochs must be at least 1, got 0"),
        ({"minibatch_size": 0}, "minibatch_size must be at least 1 or null, got 0"),
        ({"ent_coef": -0.1}, "ent_coef must be at least 0, got -0.1"),
        ({"vf_coef": 0.0}, "vf_coef must be positive, got 0.0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps must be at least 0, got -1"),
    ],
)
def test_invalid_hyper_parameters_are_rejected(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        PPOModule(TinyModel(), **options)


# -- checkpoints ------------------------------------------------------------------------------------------------------


# Lists of batches do not know where they stopped; the second fit is handed the rest.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_checkpoint_holds_only_trained_roles_and_training_resumes_bitwise(tmp_path):
    options = {"kl_reward": KLTerm(0.1), "ref": TinyModel(seed=3), "reward_model": TinyModel(seed=2)}
    adam = {name: partial(torch.optim.AdamW, lr=1e-2) for name in ("optimizer", "critic_optimizer")}
    batches = [rollout(responses(8, seed=i)) for i in range(4)]
    straight = ppo("float32", **options, **adam)
    fit(straight, batches)

    first = ppo("float32", **options, **adam)
    trainer = fit(first, batches, max_steps=2, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    held = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert {name.split(".")[0] for name in held} == {"actor", "critic"}

    second = ppo("float32", **options, **adam)
    fit(second, batches[2:] * 2, ckpt=tmp_path / "half.ckpt", max_steps=4, max_epochs=-1)
    for role in ("actor", "critic", "ref", "reward_model"):
        assert distance(weights(straight, role), weights(second, role)) == 0


def test_checkpoint_without_a_trained_role_is_rejected(tmp_path):
    """Loading is not strict because frozen roles are missing, but a critic must not be reinitialized silently."""
    module = ppo("float32")
    trainer = fit(module, [rollout()])
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    held = checkpoint["state_dict"]
    checkpoint["state_dict"] = {name: value for name, value in held.items() if name.startswith("actor.")}
    torch.save(checkpoint, tmp_path / "half.ckpt")
    message = r"^the checkpoint lacks \d+ weights of PPOModule, the first is critic\.\S+; it was written by another"
    with pytest.raises(ValueError, match=message):
        fit(ppo("float32"), [rollout()], ckpt=tmp_path / "half.ckpt")


def test_log_counts_clipped_tokens_and_the_kl_to_the_old_policy():
    module = ppo("float32", policy_loss=ClippedPolicyLoss(0.01), update_epochs=3)
    metrics = fit(module, [rollout()]).callback_metrics
    assert 0 < metrics["policy/clip_fraction"] < 1
    assert metrics["kl/approx"] > 0
    assert metrics["rollout/response_tokens"] == sum(len(row.tokens) for row in ROWS)
    assert metrics["rollout/truncated_fraction"] == 0.25
    assert_close(metrics["reward/given"], sum(row.reward for row in ROWS) / 8)
