"""Dynamic sampling replaces prompts without contrast up to a limit, and does not train on those that remain."""

import re
from functools import partial

import pytest
import torch

from lightning_rlhf import GRPOModule
from lightning_rlhf.callbacks import DynamicSampling
from lightning_rlhf.objectives.group_advantages import GRPO
from lightning_rlhf.objectives.return_advantages import ReMax
from tests.callbacks.conftest import Run
from tests.helpers import assert_close
from tests.stand_ins import Response, TinyModel, prompt_batch, rollout_of


def prompts(count):
    return prompt_batch(list(range(count)), [[5]] * count, ["x"] * count, {})


def rolling(rewards, requested_indices, size=2):
    """Return a rollout function with responses of growing length and the given rewards per prompt."""

    def roll(batch):
        indices = [prompt.index for prompt in batch]
        requested_indices.append(indices)
        rows = [Response([i], [1] * (i + 1), reward) for i in indices for reward in rewards[i]]
        rollout = rollout_of(rows)
        rollout.group[:] = torch.arange(len(batch)).repeat_interleave(size)
        return rollout

    return roll


SAME, DIFFERENT = [1.0, 1.0], [0.0, 1.0]


@pytest.mark.parametrize(
    ("rewards", "rounds", "learnt", "saved"),
    [
        ([DIFFERENT, DIFFERENT, SAME, SAME], 1, [0, 1], 2),
        ([SAME, DIFFERENT, DIFFERENT, DIFFERENT, SAME, SAME], 2, [1, 2], 2),  # the surplus of the last round is dropped
        ([SAME, SAME, SAME, DIFFERENT, SAME, SAME], 3, [3, 0], 1),  # the bound: another one fills the step
        ([SAME] * 4, 2, [0, 1], 0),
    ],
)
def test_rounds_repeat_until_enough_prompts_have_contrast(rewards, rounds, learnt, saved):
    requested = []
    sampling = DynamicSampling(2)
    rollout, unused, counts = sampling(prompts(len(rewards)), rolling(rewards, requested))
    assert requested == [[2 * i, 2 * i + 1] for i in range(rounds)]
    assert rollout.prompt_ids[:, 0].tolist() == [i for i in learnt for _ in range(2)]
    assert rollout.group.tolist() == [0, 0, 1, 1]
    assert rollout.included.tolist() == [i < saved for i in (0, 0, 1, 1)]
    others = [i for i in sorted(range(2 * rounds), key=lambda i: rewards[i] == SAME) if i not in learnt]
    assert unused.prompt_ids[:, 0].tolist() == [i for i in others for _ in range(2)]
    assert unused.reward.tolist() == [reward for i in others for reward in rewards[i]]
    generated = rewards[: 2 * rounds]
    assert sampling.metrics(counts) == {
        "rollout/generated_prompts": 2.0 * rounds,
        "rollout/contrast_fraction": sum(pair == DIFFERENT for pair in generated) / len(generated),
        "rollout/filled_fraction": 1 - saved / 2,
        "reward/generated_mean": pytest.approx(sum(sum(pair) for pair in generated) / (2 * len(generated))),
    }


def test_ranks_sample_their_share_of_prompts_and_report_common_metrics():
    requested, sampling = [], DynamicSampling(4)
    shares = [[SAME, DIFFERENT, DIFFERENT, SAME], [SAME] * 4]
    both = [sampling(prompts(4), rolling(rewards, requested), 2) for rewards in shares]
    assert requested == 2 * [[0, 1], [2, 3]]
    assert [rollout.included.tolist() for rollout, _, _ in both] == [[True] * 4, [False] * 4]
    total = {name: both[0][2][name] + both[1][2][name] for name in both[0][2]}
    assert sampling.metrics(total) == {
        "rollout/generated_prompts": 8.0,
        "rollout/contrast_fraction": 2 / 8,
        "rollout/filled_fraction": 2 / 4,
        "reward/generated_mean": pytest.approx((2 + 1 + 1 + 2 + 8) / 16),
    }


def test_reward_that_must_differ_can_be_selected():
    def roll(batch):
        rollout = rollout_of([Response([3], [4], 0.5 * i) for i in range(4)])
        rollout.group[:] = torch.tensor([0, 0, 1, 1])
        rollout.rewards["right"] = torch.tensor([0.0, 0.0, 0.0, 1.0])
        return rollout

    rollout, _, _ = DynamicSampling(2, reward="right")(prompts(2), roll)
    assert rollout.included.tolist() == [True, True, False, False]
    assert_close(rollout.reward, [1.0, 1.5, 0.0, 0.5])


def test_prompt_without_any_reward_has_no_contrast():
    def included(*values):
        def roll(batch):
            rollout = rollout_of([Response([3], [4])] * 4)
            rollout.group[:] = torch.tensor([0, 0, 1, 1])
            rollout.rewards["right"] = torch.tensor(values)
            return rollout

        return DynamicSampling(2, reward="right")(prompts(2), roll)[0].included.sum()

    assert included(torch.nan, torch.nan, 0.0, 1.0) == 2
    assert included(torch.nan, 1.0, 1.0, torch.nan) == 0


@pytest.mark.parametrize(
    ("sampling", "batch_size", "group_size", "rewards", "advantages", "message"),
    [
        (
            DynamicSampling(3),
            4,
            2,
            ["a"],
            GRPO(),
            "does not divide the data's batch_size 4: use a multiple",
        ),
        (
            DynamicSampling(2),
            4,
            1,
            ["a"],
            GRPO(),
            "responses to one prompt: group_size must be at least 2, got 1",
        ),
        (
            DynamicSampling(2),
            4,
            2,
            [],
            GRPO(),
            "compares the values of a reward: any is not among []",
        ),
        (DynamicSampling(2, "b"), 4, 2, ["a"], GRPO(), "b is not among ['a']"),
        (DynamicSampling(2), 4, 2, ["a"], ReMax(), "does not support the greedy responses of ReMax"),
    ],
)
def test_invalid_settings_raise(sampling, batch_size, group_size, rewards, advantages, message):
    weights = dict.fromkeys(rewards, 1.0)
    with pytest.raises(ValueError, match=re.escape(message)):
        sampling.check(batch_size, group_size, weights, advantages, ranks=1)


def test_score_of_a_reward_model_can_make_the_contrast():
    DynamicSampling(2).check(4, 2, {}, GRPO(), ranks=1, scored=True)
    with pytest.raises(ValueError, match="b is not among \\[\\]"):
        DynamicSampling(2, "b").check(4, 2, {}, GRPO(), ranks=1, scored=True)
    scores = {0: [0.5, 0.5], 1: [0.1, 0.2], 2: [3.0, 1.0], 3: [0.0, 0.0]}

    def total(rollout):
        return rollout.reward + torch.tensor([scores[int(i)][k % 2] for k, i in enumerate(rollout.prompt_ids[:, 0])])

    rollout, unused, _ = DynamicSampling(2)(prompts(4), rolling([SAME] * 4, []), total_reward=total)
    assert rollout.prompt_ids[:, 0].tolist() == [1, 1, 2, 2]
    assert rollout.reward.tolist() == [1.0] * 4  # the module adds the scores
    assert_close(unused.reward, [1.5, 1.5, 1.0, 1.0])


def test_prompts_per_step_must_be_at_least_one():
    with pytest.raises(ValueError, match=r"^prompts_per_step must be at least 1, got 0$"):
        DynamicSampling(0)


class GroupRun(Run):
    """A GRPO run with two responses per prompt; every second response to the first prompt has a reward."""

    def __init__(self, directory, **options):
        super().__init__(directory, **options)
        decaying = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        self.module = GRPOModule(TinyModel(), optimizer=decaying, minibatch_size=2, max_grad_norm=None)


def test_step_trains_on_the_prompt_with_contrast_as_if_it_were_the_only_one(tmp_path):
    """Each prompt gets the responses "c" and "b": the first prompt has no contrast, the second has."""
    sampling = DynamicSampling(prompts_per_step=1)
    loop = {"group_size": 2, "dynamic_sampling": sampling, "validate_at_ends": False}
    data = {"batch_size": 4, "shuffle": False}
    run = GroupRun(tmp_path, loop=loop, data=data, trainer={"max_steps": 1}, texts=("c", "b"))
    run.fit()
    assert [call for call in run.engine.calls if call.startswith("generate")] == ["generate 2", "generate 2"]
    assert run.metrics["rollout/generated_prompts"] == 2
    assert run.metrics["rollout/contrast_fraction"] == 0.5
    assert run.metrics["reward/mean"] == 0.5
    assert run.module.last_step.experience.mask.any(dim=1).tolist() == [True, True]


def test_step_without_contrast_changes_no_weights(tmp_path):
    loop = {"group_size": 2, "dynamic_sampling": DynamicSampling(prompts_per_step=2), "validate_at_ends": False}
    run = GroupRun(tmp_path, loop=loop, data={"batch_size": 4}, trainer={"max_steps": 1}, texts=("e",))
    run.module.configure_model()
    before = [parameter.clone() for parameter in run.module.actor.parameters()]
    run.fit()
    assert run.metrics["rollout/filled_fraction"] == 1.0
    assert not run.module.last_step.experience.mask.any()
    assert run.metrics["policy/updates"] == 0  # decay alone would move the weights
    for one, other in zip(before, run.module.actor.parameters(), strict=True):
        assert torch.equal(one, other)
