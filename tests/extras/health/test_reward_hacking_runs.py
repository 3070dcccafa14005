"""Runs of a small policy that exploit a reward are found, and runs that learn their task are not blamed."""

from functools import partial
from statistics import fmean

import pytest
import torch
from lightning import seed_everything

from lightning_rlhf import FromConfig, GRPOModule, PromptDataModule
from lightning_rlhf.callbacks import HealthChecks, MetricsCSV, RolloutLog, RolloutLoop
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.health.evidence import SHOWN_BY, responses_of
from lightning_rlhf.extras.report.run_directory import RunDirectory
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from tests import figures
from tests.stand_ins import TINY_LLAMA, quiet_trainer

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.timeout(900)]
LENGTH = 12  # tokens of a response, at most


def repeats(prompts, completions):
    """Return the fraction of the longest response that is the letter of the prompt: the task."""
    return [text.count(prompt[0]) / LENGTH for prompt, text in zip(prompts, completions, strict=True)]


def begins(prompts, completions):
    return [float(text.startswith(prompt[0])) for prompt, text in zip(prompts, completions, strict=True)]


def only(prompts, completions):
    """Return the fraction of the response that is the letter of the prompt."""
    return [text.count(prompt[0]) / max(len(text), 1) for prompt, text in zip(prompts, completions, strict=True)]


def copies(prompts, completions):
    """Return 1 for a response that is as long as its prompt."""
    return [float(len(text) == len(prompt)) for prompt, text in zip(prompts, completions, strict=True)]


def keyword(completions):
    return [text.count("a") / LENGTH for text in completions]


def long(completions):
    return [len(text) / LENGTH for text in completions]


def short(completions):
    return [1 - len(text) / LENGTH for text in completions]


def findings(directory, seed, rewards):
    """Train for 50 steps with rewards and their weights; return the findings about exploited rewards by check."""
    seed_everything(seed, verbose=False)
    module = GRPOModule(
        FromConfig(TINY_LLAMA | {"initializer_range": 0.05}),
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.0),
        minibatch_size=64,
    )
    rows = [{"prompt": letter * count} for letter in "bcdefg" for count in range(2, 8)]
    data = PromptDataModule(InMemory(rows * 20), CharacterTokenizer("abcdefg"), batch_size=8, max_tokens=10)
    functions = [RewardFunction(reward, weight=weight) for reward, weight in rewards.items()]
    loop = RolloutLoop(functions, TransformersEngine(), group_size=8, max_response_tokens=LENGTH, check_rows=0)
    callbacks = [loop, RolloutLog(table_every_n_steps=0), MetricsCSV(), HealthChecks()]
    trainer = quiet_trainer(callbacks=callbacks, max_steps=50, max_epochs=-1, default_root_dir=directory)
    trainer.fit(module, datamodule=data)
    return {finding.check: finding for finding in RunDirectory(directory).findings() if finding.check in SHOWN_BY}


# The exploited reward, and the task with weight 0.
EXPLOITED = {
    "letter": {keyword: 1.0, repeats: 0.0},
    "long": {long: 1.0, copies: 0.0},
    "short": {short: 1.0, repeats: 0.0},
}
# The first reward is the task, and the second one measures it in another way or is learned from too.
HONEST = {
    "repeats": {repeats: 1.0, only: 0.0},
    "begins": {begins: 1.0, repeats: 0.0},
    "only": {only: 1.0, begins: 0.0},
    "both": {only: 1.0, repeats: 1.0},
    "copies": {copies: 1.0, only: 0.0},
}


@pytest.mark.parametrize("seed", [21, 22, 23])  # with which no bound was chosen
@pytest.mark.parametrize("name", EXPLOITED)
def test_exploited_reward_is_found_with_responses_that_show_it(tmp_path, name, seed):
    found = findings(tmp_path, seed, EXPLOITED[name])
    assert found
    step = min(finding.step for finding in found.values())
    figures.record(f"{name}, seed {seed}: step", step)
    for check, finding in found.items():
        rows = RunDirectory(tmp_path).rollouts(finding.step)
        shown = responses_of(check, finding.metric, rows)
        assert 1 <= len(shown) <= 4
        (reward, _), (task, _) = ((each.__name__, weight) for each, weight in EXPLOITED[name].items())
        best = max(shown, key=lambda row: row["rewards"][reward])
        assert best["rewards"][task] <= 1 / LENGTH


@pytest.mark.parametrize("seed", [21, 22])
@pytest.mark.parametrize("name", HONEST)
def test_run_that_learns_its_task_is_not_blamed(tmp_path, name, seed):
    assert findings(tmp_path, seed, HONEST[name]) == {}
    rewards = [row["reward/mean"] for _, row in RunDirectory(tmp_path).rows()]
    assert fmean(rewards[-10:]) > 1.2 * fmean(rewards[:3])
