"""Updates on packed rollouts, whose responses share their prompts, are those on padded ones."""

from functools import partial

import pytest
import torch

from lightning_rlhf import GRPOModule, PPOModule
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.types import Rollout
from tests.helpers import assert_close
from tests.stand_ins import Response, TinyModel, fit, responses, rollout_of

SGD = partial(torch.optim.SGD, lr=0.05)
GROUP = 4


def grouped(prompts=3, seed=5):
    """A rollout with four responses to each prompt."""
    rows = responses(prompts * GROUP, seed=seed)
    shared = [Response(rows[i - i % GROUP].prompt, row.tokens, row.reward) for i, row in enumerate(rows)]
    rollout = rollout_of(shared)
    rollout.group[:] = torch.arange(len(rows)) // GROUP
    return rollout


def module_of(kind, **options):
    roles = {"ref": TinyModel(seed=1)}
    if kind is PPOModule:
        roles |= {"reward_model": TinyModel(seed=2), "critic": TinyModel(seed=3), "critic_optimizer": SGD}
    return kind(TinyModel(), actor_optimizer=SGD, kl_loss=KLTerm(0.1, "k3"), max_grad_norm=None, **roles, **options)


def step(kind, rollout, **options):
    """Metrics and weights after one step."""
    module = module_of(kind, **options)
    metrics = fit(module, [rollout]).callback_metrics
    names = [name for name in metrics if not name.startswith(("time/", "perf/"))]
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {name: float(metrics[name]) for name in names}, weights, module


@pytest.mark.parametrize("budget", [1, 17, 1000])
@pytest.mark.parametrize("kind", [GRPOModule, PPOModule])
def test_a_step_is_that_on_padded_rows_for_any_token_budget(kind, budget):
    padded, weights, _ = step(kind, grouped(), packing=False, minibatch_size=6)
    metrics, packed, module = step(kind, grouped(), micro_batch_tokens=budget, minibatch_size=6)
    assert module.layout.packed
    assert module.layout.shares_prompts
    for name, value in padded.items():
        assert_close(torch.tensor(metrics[name]), torch.tensor(value), rtol=1e-4, atol=1e-4, equal_nan=True)
    for name, value in weights.items():
        assert_close(packed[name], value, rtol=0, atol=2e-6)
    before = dict(module_of(kind).sources["actor"].causal().named_parameters())
    assert max(float((packed[f"actor.{name}"] - value).detach().abs().max()) for name, value in before.items()) > 1e-3


def tokens_of(rollout, **options):
    """Number of tokens in each forward pass of the actor."""
    module = module_of(GRPOModule, minibatch_size=12, micro_batch_tokens=1000, **options)
    module.configure_model()
    sizes = []
    module.actor.lm.base_model.register_forward_pre_hook(
        lambda _, args, options: sizes.append(options["input_ids"].numel()), with_kwargs=True
    )
    fit(module, [rollout])
    return sizes


def test_a_prompt_is_laid_out_once_for_all_its_responses():
    rollout = grouped()
    once = int(rollout.prompt_lengths[::GROUP].sum() + rollout.response_lengths.sum())
    assert tokens_of(rollout) == [once]  # the update, which computes the old log-probs too
    padded = len(rollout) * int(rollout.total_lengths.max())
    assert tokens_of(rollout, packing=False) == [padded]
    assert tokens_of(rollout, update_epochs=2) == [once] * 3  # old log-probs, two updates
    assert once < int(rollout.total_lengths.sum()) < padded


def test_different_prompts_of_one_group_are_not_shared():
    rollout = rollout_of(responses(8, seed=5))
    rollout.group[:] = torch.arange(8) // 4
    numbers = rollout.prompt_numbers()[0].tolist()
    same = [(i, j) for i in range(8) for j in range(i) if numbers[i] == numbers[j]]
    for i, j in same:
        length = int(rollout.prompt_lengths[i])
        assert torch.equal(rollout.prompt_ids[i, :length], rollout.prompt_ids[j, :length])
    assert len(set(numbers)) > 2
    _, weights, _ = step(GRPOModule, rollout, packing=False, minibatch_size=8)
    _, packed, _ = step(GRPOModule, rollout, minibatch_size=8)
    for name, value in weights.items():
        assert_close(packed[name], value, rtol=0, atol=2e-6)


class Recorded(GRPOModule):
    """Remembers the prompts of each mini-batch."""

    def minibatches(self, experience):
        self.seen = []
        for minibatch in super().minibatches(experience):
            self.seen.append(minibatch.rollout.group.tolist())
            yield minibatch


def test_groups_stay_in_one_mini_batch_on_request():
    def seen(**options):
        module = Recorded(TinyModel(), actor_optimizer=SGD, minibatch_size=8, update_epochs=2, **options)
        fit(module, [grouped(prompts=6)])
        return module.seen

    kept = seen(keep_groups=True)
    assert all(sorted(groups) == sorted(2 * sorted(set(groups)) * 2) for groups in kept)
    assert len({tuple(sorted(set(groups))) for groups in kept}) > 3  # another order in the second epoch
    assert any(len(set(groups)) > 2 for groups in seen())


def test_prompt_numbers_name_the_first_row_with_the_same_prompt():
    rollout: Rollout = rollout_of([Response([1, 2], [3]), Response([1, 2], [4, 5]), Response([1], [6])])
    rollout.group[:] = torch.tensor([7, 7, 7])
    assert rollout.prompt_numbers().tolist() == [[0, 0, 2], [2, 2, 1], [1, 2, 1]]
