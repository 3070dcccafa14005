"""Rollout and update together under a real Trainer: the calls of the engine, and the data that reach the module."""

from functools import partial

import pytest
import torch

from lightning_rlhf import PPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.rewards.function import RewardFunction
from tests.stand_ins import ScriptedEngine, TinyModel, quiet_trainer

TEXTS = ["a", "ab", "abc", "abcdefg"]


def length(completions):
    return [float(len(text)) for text in completions]


class RecordingPPO(PPOModule):
    """Records the rollouts that it trained on and the learning rates that it logged."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.seen = [*getattr(self, "seen", []), self.last_step.experience.rollout]

    def finish_step(self, metrics, bar):
        super().finish_step(metrics, bar)
        self.rates = [*getattr(self, "rates", []), (metrics["lr/actor"], metrics["lr/critic"])]


@pytest.fixture
def trained(tokenizer, tmp_path):
    """A run of three steps with two prompts, two responses per prompt and four mini-batches per step."""
    engine = ScriptedEngine(TEXTS, tokenizer)
    module = RecordingPPO(
        TinyModel(),
        optimizer=partial(torch.optim.SGD, lr=0.2),
        critic_optimizer=partial(torch.optim.SGD, lr=0.1),
        critic_lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
        update_epochs=2,
        minibatch_size=2,
    )
    rows = InMemory([{"prompt": prompt} for prompt in ("b", "cc", "ddd", "e", "ff", "g")])
    data = PromptDataModule(rows, CharacterTokenizer("abcdefg"), batch_size=2, max_tokens=4, shuffle=False)
    loop = RolloutLoop([RewardFunction(length)], engine, group_size=2, max_response_tokens=6, check_rows=0)
    trainer = quiet_trainer(callbacks=[loop], default_root_dir=tmp_path)
    trainer.fit(module, datamodule=data)
    return trainer, module, engine


def test_each_step_pushes_the_weights_once_and_generates_once(trained):
    _, _, engine = trained
    steps = [f"{what} {number}" for step in range(3) for what, number in (("update_weights", step), ("generate", 4))]
    assert [call for call in engine.calls if call.split()[0] in ("update_weights", "generate")] == steps
    assert engine.calls[0] == "start"
    assert engine.calls[-1] == "close"


def test_step_counts_once_regardless_of_its_optimizer_steps(trained):
    trainer, module, _ = trained
    assert trainer.global_step == len(module.seen) == 3
    assert [int(rollout.policy_version.max()) for rollout in module.seen] == [0, 1, 2]


def test_schedule_advances_once_per_rollout(trained):
    assert trained[1].rates == [(0.2, 0.1), (0.2, 0.05), (0.2, 0.025)]


def test_module_trains_on_exactly_the_generated_tokens(trained, tokenizer):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [2] for text in TEXTS]
    for rollout in trained[1].seen:
        for row, expected in enumerate(ids):
            output = rollout.response_ids[row, : rollout.response_lengths[row]].tolist()
            assert output == expected[:6]
        assert rollout.truncated.tolist() == [False, False, False, True]
        assert rollout.group.tolist() == [0, 0, 1, 1]
    prompts = trained[1].seen[1]
    assert prompts.prompt_ids[:, :3].tolist()[1] == tokenizer("ddd", add_special_tokens=False)["input_ids"]
    assert prompts.prompt_lengths.tolist() == [3, 3, 1, 1]


def test_rewards_receive_the_text_and_are_logged(trained):
    trainer, module, _ = trained
    assert module.seen[0].reward.tolist() == [1, 2, 3, 6]  # the last one was cut
    assert trainer.callback_metrics["reward/length"] == 3
    assert trainer.callback_metrics["rollout/truncated_fraction"] == 0.25
