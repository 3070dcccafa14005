"""Updates on packed rollouts, whose responses share their prompts, equal those on padded ones."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_rlhf import GRPOModule, PPOModule
from lightning_rlhf.batching.packing import pack_texts
from lightning_rlhf.models.sequence_parallel import SequenceRanks
from lightning_rlhf.modules.text_layout import breaks_of
from lightning_rlhf.objectives.kl_controllers import KLTerm
from lightning_rlhf.types import ConversationTokens, Rollout
from tests.helpers import assert_close
from tests.stand_ins import Response, TinyModel, fit, responses, rollout_of

SGD = partial(torch.optim.SGD, lr=0.05)
GROUP = 4


def grouped(prompts=3, seed=5):
    """Return a rollout with four responses to each prompt."""
    rows = responses(prompts * GROUP, seed=seed)
    shared = [Response(rows[i - i % GROUP].prompt, row.tokens, row.reward) for i, row in enumerate(rows)]
    rollout = rollout_of(shared)
    rollout.group[:] = torch.arange(len(rows)) // GROUP
    return rollout


def module_of(kind, **options):
    roles = {"ref": TinyModel(seed=1)}
    if kind is PPOModule:
        roles |= {"reward_model": TinyModel(seed=2), "critic": TinyModel(seed=3), "critic_optimizer": SGD}
    return kind(TinyModel(), optimizer=SGD, kl_loss=KLTerm(0.1, "k3"), max_grad_norm=None, **roles, **options)


def step(kind, rollout, **options):
    """Return metrics and weights after one step."""
    module = module_of(kind, **options)
    metrics = fit(module, [rollout]).callback_metrics
    names = [name for name in metrics if not name.startswith(("time/", "perf/"))]
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {name: float(metrics[name]) for name in names}, weights, module


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("budget", [1, 17, 1000])
@pytest.mark.parametrize("kind", [GRPOModule, PPOModule])
def test_step_equals_that_on_padded_rows_for_any_token_budget(kind, budget):
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
    """Return the number of tokens in each forward pass of the actor."""
    module = module_of(GRPOModule, minibatch_size=12, micro_batch_tokens=1000, **options)
    module.configure_model()
    sizes = []
    module.actor.lm.base_model.register_forward_pre_hook(
        lambda _, args, options: sizes.append(options["input_ids"].numel()), with_kwargs=True
    )
    fit(module, [rollout])
    return sizes[4:]  # without those of the test of the head


def test_prompt_is_laid_out_once_for_all_its_responses():
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
    """Records the prompts of each mini-batch."""

    def minibatches(self, experience):
        self.seen = []
        for minibatch in super().minibatches(experience):
            self.seen.append(minibatch.rollout.group.tolist())
            yield minibatch


def test_groups_stay_in_one_mini_batch_on_request():
    def seen(**options):
        module = Recorded(TinyModel(), optimizer=SGD, minibatch_size=8, update_epochs=2, **options)
        fit(module, [grouped(prompts=6)])
        return module.seen

    saved = seen(keep_groups=True)
    assert all(sorted(groups) == sorted(2 * sorted(set(groups)) * 2) for groups in saved)
    assert len({tuple(sorted(set(groups))) for groups in saved}) > 3  # another order in the second epoch
    assert any(len(set(groups)) > 2 for groups in seen())


def test_prompt_numbers_are_the_first_row_with_the_same_prompt():
    rollout: Rollout = rollout_of([Response([1, 2], [3]), Response([1, 2], [4, 5]), Response([1], [6])])
    rollout.group[:] = torch.tensor([7, 7, 7])
    assert rollout.prompt_numbers().tolist() == [[0, 0, 2], [2, 2, 1], [1, 2, 1]]


def branched(joined=True):
    """Return rows of two texts each, and every third of one; or the texts as separate rows."""
    rows, starts, texts = [], [], []
    parts = responses(24, seed=7)
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        if len(rows) % 3 == 2:
            rows.append(Response(parts[0].prompt, first.tokens, first.reward))
            starts.append(None)
            texts.append(rows[-1])
            continue
        mask = [True] * len(first.tokens) + [False] * len(second.prompt) + [True] * len(second.tokens)
        tokens = [*first.tokens, *second.prompt, *second.tokens]
        rows.append(Response(first.prompt, tokens, first.reward, policy=mask))
        starts.append(len(first.tokens))
        texts += [Response(first.prompt, first.tokens), Response(second.prompt, second.tokens)]
    if not joined:
        return rollout_of(texts)
    rollout = rollout_of(rows)
    rollout.group[:] = torch.arange(len(rows)) // GROUP
    marks = torch.zeros_like(rollout.response_mask)
    for row, start in enumerate(starts):
        if start is not None:
            marks[row, start] = True
    return replace(rollout, conversation=ConversationTokens(torch.zeros_like(rollout.rollout_logprobs), marks))


def sampled_scores(module, rollout):
    """Return log-probabilities and values of the sampled tokens in order, and the gradient of the sum of the former."""
    logprobs = module.actor_scores("actor", rollout).logprobs[rollout.response_mask]
    values = module.critic_values(rollout)[0][rollout.response_mask]
    wanted = [p for p in module.actor.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((logprobs * torch.linspace(-1, 2, len(logprobs))).sum(), wanted)
    return logprobs, values, torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("packed", [True, False])
def test_texts_in_one_row_are_computed_as_if_they_were_separate(packed):
    module = module_of(PPOModule, packing=packed, minibatch_size=6)
    fit(module, [grouped()])
    assert module.layout.packed == packed
    apart, joined = branched(joined=False), branched()
    assert len(apart) == 20
    for one, other in zip(sampled_scores(module, apart), sampled_scores(module, joined), strict=True):
        assert_close(other, one, rtol=0, atol=2e-5)
        assert other.abs().max() > 0.1
    last = torch.cat([apart.truncated.new_tensor([False, True] * 2 + [True]).repeat(4)])
    assert_close(module.scores(joined), module.scores(apart)[last], rtol=0, atol=2e-5)
    without = module.actor_scores("actor", replace(joined, conversation=None)).logprobs[joined.response_mask]
    assert (without - sampled_scores(module, apart)[0]).abs().max() > 1e-3


def test_texts_in_one_row_are_not_padded_where_processes_divide_rows():
    module, rollout = module_of(PPOModule, packing=False, minibatch_size=6), branched()
    fit(module, [grouped()])
    input_ids, _, padded = module.layout.lay_out(rollout)
    module.actor.sequence_ranks = SequenceRanks(0, 2, None)
    divided = module.layout.lay_out(rollout)[2]
    expected = pack_texts(rollout.total_lengths.tolist(), input_ids.shape[1], breaks=breaks_of(rollout))
    assert torch.equal(divided.tokens, expected.tokens)
    assert (padded.lengths, divided.lengths) == (((), ()), expected.lengths)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("budget", [1, 17, 1000])
@pytest.mark.parametrize("kind", [GRPOModule, PPOModule])
def test_step_on_rows_of_several_texts_equals_that_on_padded_ones(kind, budget):
    padded, weights, _ = step(kind, branched(), packing=False, minibatch_size=6)
    metrics, packed, _ = step(kind, branched(), micro_batch_tokens=budget, minibatch_size=6)
    for name, value in padded.items():
        assert_close(torch.tensor(metrics[name]), torch.tensor(value), rtol=1e-4, atol=1e-4, equal_nan=True)
    for name, value in weights.items():
        assert_close(packed[name], value, rtol=0, atol=2e-6)


def test_all_texts_of_a_row_have_its_advantage():
    rollout = branched()
    _, _, module = step(GRPOModule, rollout, minibatch_size=12)
    advantages, group = module.last_step.experience.advantages, rollout.reward.view(-1, GROUP)
    expected = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-6)
    mask = rollout.response_mask
    assert_close(advantages, expected.flatten().unsqueeze(1) * mask, rtol=1e-3, atol=1e-3)
