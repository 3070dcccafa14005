"""A trivial task is solved, and two runs with the same seed are equal."""

from functools import partial

import pytest
import torch
from lightning import seed_everything

from lightning_rlhf import FromConfig, PPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.objectives.value_losses import ClippedValueLoss
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests.stand_ins import TINY_LLAMA, quiet_trainer

pytestmark = pytest.mark.learning
LENGTH, STEPS = 6, 30


def fraction_of_a(completions):
    """Return the fraction of the letter a in the longest possible response; the best policy always writes aaaaaa."""
    return [text.count("a") / LENGTH for text in completions]


class RewardRecorder(PPOModule):
    """Records the mean reward of each step."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.history = [*getattr(self, "history", []), self.last_step.experience.rollout.reward.mean().item()]


def run(directory, seed, steps=STEPS):
    """Return the mean reward of every step, and the final weights of the actor."""
    seed_everything(seed, verbose=False)
    adam = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.0)
    module = RewardRecorder(
        FromConfig(TINY_LLAMA | {"initializer_range": 0.05}),
        optimizer=adam,
        critic_optimizer=adam,
        kl_reward=KLTerm(0.01),
        value_loss=ClippedValueLoss(None),
        update_epochs=2,
        minibatch_size=32,
    )
    rows = [{"prompt": letter * count} for letter in "bcdefg" for count in range(1, 6)]
    data = PromptDataModule(InMemory(rows * 2), CharacterTokenizer("abcdefg"), batch_size=16, max_tokens=8)
    loop = RolloutLoop(
        [RewardFunction(fraction_of_a)], TransformersEngine(), group_size=4, max_response_tokens=LENGTH, check_rows=2
    )
    trainer = quiet_trainer(callbacks=[loop], max_steps=steps, max_epochs=-1, default_root_dir=directory)
    trainer.fit(module, datamodule=data)
    return module.history, module.actor.state_dict()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return run(tmp_path_factory.mktemp("first"), seed=1)


@pytest.mark.slow
def test_toy_task_is_solved(first):
    history, _ = first
    assert len(history) == STEPS
    assert history[0] < 0.25  # one of ten tokens, fewer in responses that stop early
    assert sum(history[-3:]) / 3 > 0.9


@pytest.mark.slow
def test_same_seed_gives_the_same_rewards_and_bitwise_equal_weights(first, tmp_path):
    history, weights = first
    again, same_weights = run(tmp_path, seed=1)
    assert again == history
    assert all(torch.equal(value, same_weights[name]) for name, value in weights.items())


@pytest.mark.slow
def test_another_seed_gives_another_run(first, tmp_path):
    history, _ = run(tmp_path, seed=2, steps=2)
    assert history != first[0][:2]
