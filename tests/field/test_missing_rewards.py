"""A response without a reward is left out everywhere: as if it had not been sampled, for every estimator."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_rlhf import FromConfig, GRPOModule, PPOModule, PromptDataModule, RLHFModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.algorithms.teacher_advantages import NoAdvantages
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.aggregation import TokenMean
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.scorer import weighted_sum
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.types import StepRollout
from tests.helpers import assert_close
from tests.modules.test_matrix import ESTIMATORS, NAMES, rollouts
from tests.stand_ins import TINY_LLAMA, TinyModel, quiet_trainer

pytestmark = pytest.mark.usefixtures("exact")
MISSING = torch.tensor([False, True, False, False, False, True])


def step(estimator, received):
    """Return a module after a step of SGD with one mini-batch, and the metrics of the step."""
    model = TinyModel(dtype="float64")
    options = {"minibatch_size": len(received.rollout), "aggregation": TokenMean(), "max_grad_norm": None}
    rate = partial(torch.optim.SGD, lr=0.5)
    if estimator.needs_critic:
        module = PPOModule(model, advantages=estimator, critic_optimizer=rate, optimizer=rate, **options)
    else:
        module = RLHFModule(model, advantages=estimator, optimizer=rate, **options)
    trainer = quiet_trainer(callbacks=[HandOver(received)])
    trainer.fit(module, DataLoader([torch.zeros(1)], batch_size=None))
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


class HandOver(Callback):
    """Passes a rollout with its greedy responses to the module."""

    provides_rollouts = True

    def __init__(self, received):
        self.received = received

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.receive(self.received)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=[f"{name}-{i}" for i, name in enumerate(NAMES)])
def test_a_step_is_the_same_without_the_response(estimator):
    rollout, greedy = rollouts()
    greedy = greedy if estimator.needs_greedy else None
    style = rollout.rewards["style"].masked_fill(MISSING, math.nan)
    rewards = {"given": rollout.reward.masked_fill(MISSING, math.nan), "style": style}
    # GDPO reads the rewards by name, and leaves out those that did not apply.
    part = replace(rollout, rewards=rewards, reward=rewards["given"])
    whole, metrics = step(estimator, StepRollout(part, greedy))
    without, expected = step(estimator, StepRollout(rollout[~MISSING], greedy))
    for name, weight in whole.state_dict().items():
        assert_close(weight, without.state_dict()[name], rtol=0, atol=1e-12)
    assert metrics["reward/missing_fraction"] == pytest.approx(1 / 3)
    judged = ("reward/", "advantage/", "return/", "group/", "loss/", "grad_norm/")
    for name in expected:
        if name.startswith(judged) and name != "reward/missing_fraction":
            assert metrics[name] == pytest.approx(expected[name], nan_ok=True), name


def test_reward_of_nothing_is_none_and_weights_of_0_only_log():
    nan = math.nan
    first, second = torch.tensor([1.0, nan, nan]), torch.tensor([nan, 2.0, nan])
    assert_close(weighted_sum([(1.0, first), (0.5, second)], 3), torch.tensor([1.0, 1.0, nan]), equal_nan=True)
    assert_close(weighted_sum([(1.0, first), (0.0, second)], 3), torch.tensor([1.0, nan, nan]), equal_nan=True)
    assert_close(weighted_sum([(0.0, first)], 3), torch.zeros(3))


def train(tmp_path, rewards, steps=1, **loop):
    """Train GRPO on two prompts of four responses each, and return the module and its metrics."""
    data = PromptDataModule(
        InMemory([{"prompt": "ab"}, {"prompt": "ba"}]), CharacterTokenizer("abcd"), batch_size=2, shuffle=False
    )
    module = GRPOModule(FromConfig({**TINY_LLAMA, "vocab_size": 8}, seed=0), minibatch_size=8)
    callback = RolloutLoop(rewards=rewards, engine=TransformersEngine(), group_size=4, max_response_tokens=4, **loop)
    trainer = quiet_trainer(
        callbacks=[callback], max_steps=steps, default_root_dir=tmp_path, use_distributed_sampler=False
    )
    trainer.fit(module, datamodule=data)
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


class Judge:
    """A judge that fails for the second response of each prompt."""

    per_sample = False

    def __init__(self):
        self.calls = 0

    def __call__(self, completions):
        self.calls += 1
        if self.calls % 4 == 2:
            raise RuntimeError("the judge is busy")
        return [5.0 + len(text) for text in completions]


def always(completions):
    return [0.25] * len(completions)


@pytest.mark.parametrize("others", [[], [RewardFunction(always, dry_call=False)]], ids=["alone", "beside another"])
def test_a_failed_judge_leaves_the_response_out(tmp_path, others):
    judge = RewardFunction(Judge(), name="judge", on_error="skip", per_sample=True, timeout_s=None, dry_call=False)
    module, metrics = train(tmp_path, [judge, *others])
    experience = module.last_step.experience
    left_out = experience.reward.isnan()
    assert left_out.sum() == 2
    assert torch.equal(left_out, experience.rollout.rewards["judge"].isnan())
    assert not experience.mask[left_out].any()
    assert metrics["reward/mean"] == pytest.approx(float(experience.reward[~left_out].mean()))
    assert metrics["reward/missing_fraction"] == 0.25


def test_what_learns_from_no_reward_keeps_a_response_whose_judge_failed():
    rollout, _ = rollouts()
    skipped = replace(rollout, reward=rollout.reward.masked_fill(MISSING, math.nan), skipped=MISSING)
    module = RLHFModule(TinyModel(), advantages=NoAdvantages())
    assert module.learned_rows(skipped, skipped.reward).all()
    module = GRPOModule(TinyModel())
    assert torch.equal(module.learned_rows(skipped, skipped.reward), ~MISSING)


def test_a_reward_model_gives_no_reward_to_a_response_whose_judge_failed():
    rollout, _ = rollouts()
    module = GRPOModule(TinyModel(), reward_model=TinyModel(seed=1))
    module.score_shaping, module.scores = (lambda scores, truncated: scores), (lambda rows: torch.ones(len(rows)))
    unjudged = replace(rollout, reward=rollout.reward.masked_fill(MISSING, math.nan))
    assert module.total_reward(unjudged)[MISSING].tolist() == [1.0, 1.0]
    skipped = replace(unjudged, skipped=MISSING)
    assert module.total_reward(skipped).isnan().equal(MISSING)


def nothing(completions):
    return [None] * len(completions)


def test_a_step_without_any_reward_changes_nothing_and_says_so(tmp_path, caplog):
    _, metrics = train(tmp_path, [RewardFunction(nothing, dry_call=False)])
    assert "Step 1: no response has a reward, so none is learned from" in caplog.text
    assert metrics["policy/updates"] == 0
    assert math.isnan(metrics["reward/mean"])


def test_a_critic_learns_from_rewarded_responses_only():
    rollout, _ = rollouts()
    _, metrics = step(GAE(), StepRollout(replace(rollout, reward=torch.full((6,), math.nan))))
    assert metrics["policy/updates"] == 0
