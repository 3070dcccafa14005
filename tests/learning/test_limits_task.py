"""A task that a policy with limits learns, and one without them does not: each long response has a wrong token.

The policy begins with a probability of 0.61 for each right letter of an answer of 24 letters; the others are equally
likely. One answer in a hundred thousand is free of errors, so there is nothing to learn from. ``min_p`` removes the
unlikely letters. What is left to learn is the last letter, of which two are equally likely at first.
"""

from functools import partial

import pytest
import torch
from lightning import seed_everything
from torch.nn import functional

from lightning_rlhf import GRPOModule, PromptDataModule
from lightning_rlhf.callbacks import RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from tests import figures
from tests.rollout.engines import ARCHITECTURE
from tests.stand_ins import quiet_trainer

LETTERS = "abcdefghijklmnopqrstuvw"
TOKENIZER = CharacterTokenizer(LETTERS + "yz")
PROMPTS = LETTERS[:16]
pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.timeout(900)]


def right(completions):
    """Return 1 for the letters with a y at the end."""
    return [float(text == LETTERS + "y") for text in completions]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The directory of a model that knows the task except for the last letter, and is never sure."""
    tokenizer, directory = TOKENIZER.load(), tmp_path_factory.mktemp("start")
    model = FromConfig({**ARCHITECTURE, "vocab_size": len(tokenizer), "initializer_range": 0.05}).causal().lm
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = [letter + LETTERS + end for letter in PROMPTS for end in "yz"]
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts])
    for _ in range(250):
        logits = model(ids).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.4).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def learn(start, directory, engine, seed, **limits):
    """Return the mean rewards of the first step and of the last five."""
    loop = RolloutLoop([RewardFunction(right)], engine, group_size=8, max_response_tokens=26, **limits)
    module = GRPOModule(str(start), optimizer=partial(torch.optim.AdamW, lr=3e-4), minibatch_size=128)
    seed_everything(seed)
    data = PromptDataModule(
        InMemory([{"prompt": letter} for letter in PROMPTS]), TOKENIZER, batch_size=16, max_tokens=4
    )
    means = []
    trainer = quiet_trainer(default_root_dir=directory, callbacks=[loop], max_steps=40, max_epochs=-1)
    finish = module.finish_step
    module.finish_step = lambda metrics, **options: (means.append(metrics["reward/mean"]), finish(metrics, **options))
    trainer.fit(module, datamodule=data)
    return means[0], sum(means[-5:]) / 5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_limits_teach_what_temperature_1_does_not(start, tmp_path, seed):
    before, after = learn(start, tmp_path / "limited", TransformersEngine(), seed, min_p=0.3)
    figures.record("with min_p", after)
    assert before < 0.75
    assert after > 0.9
    _, plain = learn(start, tmp_path / "plain", TransformersEngine(), seed)
    figures.record("without", plain)
    assert plain == 0


@pytest.mark.vllm
def test_limits_teach_it_with_vllm(start, tmp_path):
    before, after = learn(start, tmp_path, VLLMEngine(), 1, min_p=0.3)
    assert before < 0.75
    assert after > 0.9
