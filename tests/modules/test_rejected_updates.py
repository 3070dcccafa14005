"""An update whose tokens are all rejected in bypass mode is skipped, as with rejection before the updates."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rlhf import PPOModule, RLHFModule
from lightning_rlhf.objectives.corrections import RolloutCorrection
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.policy_losses import ReinforceLoss
from lightning_rlhf.objectives.rejections import Rejection
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.stand_ins import Response, TinyModel, fit, responses, rollout_of

ADAMW = partial(torch.optim.AdamW, lr=5e-3, weight_decay=0.1)
ROWS = responses(6, seed=8)
REJECTIONS = (Rejection("k1", "token", upper=100.0, lower=0.01),)
BYPASS = RolloutCorrection(rejections=REJECTIONS, bypass=True)
WEIGHTED = RolloutCorrection("token", 2.0, rejections=REJECTIONS, bypass=True)
OF_UPDATES = ("policy/updates", "grad_norm/actor", "lr/actor")


class Recorded(Callback):
    """Records the weights and metrics after each step."""

    def __init__(self):
        self.weights, self.metrics = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append({name: tensor.detach().clone() for name, tensor in pl_module.named_parameters()})
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def batches(*rejected_rows):
    """Return rollouts in which the given rows are rejected: the engine's probability of their tokens is almost 0."""
    made = []
    for rows in rejected_rows:
        rollout = rollout_of(ROWS)
        rollout.rollout_logprobs[list(rows)] = -15.0
        made.append(rollout)
    return made


def trained(rollouts, kind=RLHFModule, strategy="auto", **options):
    inputs = {"optimizer": ADAMW, "minibatch_size": 3, "micro_batch_tokens": 15, "correction": BYPASS}
    module, recorded = kind(TinyModel(), **(inputs | options)), Recorded()
    fit(module, rollouts, callbacks=[recorded], strategy=strategy)
    return recorded


def equal(one, other, role=""):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items() if name.startswith(role))


def without_responses(rollout):
    """Return the rollout without responses to train on, whose updates are skipped before any forward pass."""
    return replace(rollout, included=torch.zeros_like(rollout.included))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strategy", ["auto", "offload_idle"])
@pytest.mark.parametrize(
    "options",
    [{}, {"packing": False}, {"policy_loss": ReinforceLoss(), "correction": WEIGHTED}, {"update_epochs": 2}],
    ids=str,
)
def test_update_without_an_accepted_token_is_skipped(options, strategy, tmp_path):
    def run(rollouts):
        chosen = RLHFSingleDeviceStrategy(offload_idle=True) if strategy == "offload_idle" else strategy
        return trained(rollouts, strategy=chosen, **options)

    first, rejected, last = batches([], range(6), [])
    ours, expected = run([first, rejected, last]), run([first, without_responses(rejected), last])
    assert equal(ours.weights[0], ours.weights[1])  # Adam has momentum from the first step
    assert not equal(ours.weights[1], ours.weights[2])
    for step in range(3):
        assert equal(ours.weights[step], expected.weights[step])
        for name in OF_UPDATES:
            assert ours.metrics[step][name] == pytest.approx(expected.metrics[step][name], abs=0, nan_ok=True)
    assert ours.metrics[1]["policy/updates"] == 0
    assert math.isnan(ours.metrics[1]["grad_norm/actor"])
    assert ours.metrics[1]["rollout_corr/rejected_fraction"] == 1
    assert ours.metrics[1]["loss/policy"] == 0
    assert ours.metrics[2]["policy/updates"] == 2 * options.get("update_epochs", 1)


def test_one_accepted_response_is_enough_for_an_update():
    recorded = trained(batches([], range(1, 6)), minibatch_size=6, update_epochs=2)
    assert not equal(*recorded.weights)
    assert recorded.metrics[1]["policy/updates"] == 2
    assert recorded.metrics[1]["grad_norm/actor"] > 0
    assert 0.5 < recorded.metrics[1]["rollout_corr/rejected_fraction"] < 1


def test_only_rejected_mini_batches_are_skipped_even_with_target_kl():
    # The KL of a rejected mini-batch exceeds the target, but ends no updates: it was not learned from.
    recorded = trained(batches([0, 2, 5]), minibatch_size=1, update_epochs=3, target_kl=20.0)
    assert recorded.metrics[0]["policy/updates"] == 9
    assert recorded.metrics[0]["kl/approx"] > 20.0


@pytest.mark.parametrize("options", [{"ent_coef": 0.1}, {"ref": TinyModel(seed=1), "kl_loss": KLTerm(0.1, "k3")}])
def test_entropy_bonus_and_kl_loss_of_rejected_tokens_are_trained_on(options):
    # Both count all policy tokens with bypass, so this gradient is that of the loss.
    recorded = trained(batches([], range(6)), **options)
    assert recorded.metrics[1]["policy/updates"] == 2
    assert recorded.metrics[1]["grad_norm/actor"] > 0


def test_advantages_of_zero_still_make_an_update():
    rollout = rollout_of([Response(row.prompt, row.tokens, reward=0.0) for row in ROWS])
    recorded = trained([*batches([]), rollout])
    assert recorded.metrics[1]["policy/updates"] == 2
    assert recorded.metrics[1]["grad_norm/actor"] == 0


def test_critic_trains_on_responses_that_the_policy_rejects():
    recorded = trained(batches([], range(6)), kind=PPOModule, critic_optimizer=ADAMW)
    before, after = recorded.weights
    assert equal(before, after, "actor.")
    assert not equal(before, after, "critic.")
    assert recorded.metrics[1]["grad_norm/critic"] > 0
    assert math.isnan(recorded.metrics[1]["grad_norm/actor"])
