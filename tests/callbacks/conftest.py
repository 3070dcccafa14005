"""Fixtures for tests of callbacks: a PPO run of a few steps with a scripted engine, whose parts a test can replace."""

from functools import partial

import pytest
import torch

from lightning_rlhf import PPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.rewards.function import RewardFunction
from tests.stand_ins import ScriptedEngine, TinyModel, quiet_trainer

ROWS = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(["a", "bb", "ccc", "d"], "abcd", strict=True)]


def exact(completions, answer):
    return [float(output == right) for output, right in zip(completions, answer, strict=True)]


class Run:
    """A small run; ``loop``, ``model``, ``data`` and ``trainer`` are dictionaries of arguments that override the
    defaults."""

    def __init__(
        self, directory, loop=(), model=(), data=(), trainer=(), callbacks=(), texts=("a", "b"), kind=PPOModule
    ):
        self.engine = ScriptedEngine(texts, CharacterTokenizer("abcdefg").load())
        ours = {"rewards": [RewardFunction(exact)], "engine": self.engine, "max_response_tokens": 4, "check_rows": 0}
        loop = {**({} if "rewards" in dict(loop) else {"val_metric": "exact"}), **dict(loop)}
        self.loop = RolloutLoop(**{**ours, **loop})
        sgd = partial(torch.optim.SGD, lr=0.1)
        ours = {"actor": TinyModel(), "optimizer": sgd, "critic_optimizer": sgd, "minibatch_size": 2}
        self.module = kind(**{**ours, **dict(model)})
        ours = {"train": InMemory(ROWS), "batch_size": 2, "max_tokens": 8, "tokenizer": CharacterTokenizer("abcdefg")}
        self.data = PromptDataModule(**{**ours, **dict(data)})
        options = {"default_root_dir": directory, "callbacks": [self.loop, *callbacks], **dict(trainer)}
        self.trainer = quiet_trainer(**options)

    def fit(self, **options):
        self.trainer.fit(self.module, datamodule=self.data, **options)
        return self

    @property
    def metrics(self):
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}


@pytest.fixture
def run(tmp_path):
    """A function that builds a :class:`Run`; call its ``fit``."""
    return partial(Run, tmp_path)
