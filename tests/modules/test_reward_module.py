"""Reward modelling: -log sigmoid of the score difference; all pairs have the same weight."""

from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from lightning_rlhf import RewardModule
from lightning_rlhf.functional.samples import wilson_interval
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.objectives.pairwise_loss import PairwiseLoss
from lightning_rlhf.types import PreferenceBatch, SequenceBatch
from tests.helpers import assert_close, normal, over_ranks
from tests.stand_ins import VOCABULARY, OneOfTwoRanks, TinyModel, fit


def side(lengths, seed, extra=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), max(lengths) + extra), generator=draw)
    return SequenceBatch(ids, torch.tensor(lengths), torch.zeros(ids.shape).bool())


def pairs(chosen, rejected, seed=0, margin=False):
    inputs = normal(len(chosen), seed=seed, dtype=torch.float32).abs() if margin else torch.zeros(len(chosen))
    return PreferenceBatch(side(chosen, seed, extra=2), side(rejected, seed + 1), inputs)


def scores(texts, dtype="float32"):
    """Return the untrained model's score of each text, one at a time and without padding."""
    lm = TinyModel(dtype=dtype).scalar().lm
    hidden = [
        lm.model(ids[None, :length]).last_hidden_state
        for ids, length in zip(texts.input_ids, texts.lengths, strict=True)
    ]
    return torch.stack([lm.score(states)[0, -1, 0] for states in hidden]), lm


def reward_module(dtype="float32", lr=0.0, **options):
    module = RewardModule(TinyModel(dtype=dtype), optimizer=partial(torch.optim.SGD, lr=lr), **options)
    module.configure_model()
    return module


@pytest.mark.parametrize("micro_batch_tokens", [7, 25, 1000])
def test_loss_accuracy_and_margin_are_those_of_scores_at_the_last_token(micro_batch_tokens):
    batch = pairs([5, 2, 7, 4], [3, 8, 1, 4])
    metrics = fit(reward_module(micro_batch_tokens=micro_batch_tokens), [batch]).callback_metrics
    difference = scores(batch.chosen)[0] - scores(batch.rejected)[0]
    assert_close(metrics["train/loss"], -logsigmoid(difference).mean())
    assert_close(metrics["train/pair_accuracy"], (difference > 0).float().mean())
    assert_close(metrics["train/score_margin"], difference.mean(), atol=1e-6)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 1000])
def test_gradient_is_that_of_the_whole_batch_for_any_token_budget(micro_batch_tokens):
    batch = pairs([5, 2, 7, 4], [3, 8, 1, 4], margin=True).to("cpu")
    module = reward_module(
        "float64", 1.0, loss=PairwiseLoss(0.1), micro_batch_tokens=micro_batch_tokens, max_grad_norm=None
    )
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit(module, [batch])
    taken = [old - new.detach() for old, new in zip(before, module.parameters(), strict=True)]

    lm = TinyModel(dtype="float64").scalar().lm
    losses = []
    for i in range(len(batch)):
        score = {}
        for name in ("chosen", "rejected"):
            texts = getattr(batch, name)
            states = lm.model(texts.input_ids[i : i + 1, : texts.lengths[i]]).last_hidden_state
            score[name] = lm.score(states)[0, -1, 0]
        difference = score["chosen"] - score["rejected"] - batch.margin[i]
        losses.append(-logsigmoid(difference) + 0.1 * (score["chosen"] + score["rejected"]) ** 2)
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(lm.parameters()))
    assert max(float((one - other).abs().max()) for one, other in zip(taken, expected, strict=True)) <= 1e-12


def test_validation_weights_every_pair_of_ragged_batches_equally():
    batches = [pairs([3], [4], 1), pairs([5, 6, 2, 4], [1, 9, 3, 3], 3), pairs([2, 8], [5, 2], 5)]
    every = torch.cat([scores(batch.chosen)[0] - scores(batch.rejected)[0] for batch in batches])
    metrics = fit(reward_module(), [batches[0]], val=batches).callback_metrics
    assert_close(metrics["val/loss"], -logsigmoid(every).mean())
    assert_close(metrics["val/pair_accuracy"], (every > 0).float().mean())
    assert metrics["val/pairs"] == 7
    bounds = torch.stack([metrics["val/pair_accuracy_low"], metrics["val/pair_accuracy_high"]])
    assert_close(bounds, torch.tensor(wilson_interval(int((every > 0).sum()), 7)))


def test_validation_weights_every_pair_of_both_ranks_equally():
    shares = [[pairs([3], [4], 1), pairs([5, 6, 2], [1, 9, 3], 3)], [pairs([2, 8], [5, 2], 5), pairs([4], [4], 7)]]
    every = torch.cat([scores(b.chosen)[0] - scores(b.rejected)[0] for share in shares for b in share])
    modules = [reward_module() for _ in shares]

    def rank(number, ranks):
        strategy = OneOfTwoRanks(ranks)
        return fit(modules[number], [shares[number][0]], val=shares[number], strategy=strategy).callback_metrics

    for metrics in over_ranks(*(partial(rank, number) for number in (0, 1))):
        assert_close(metrics["val/loss"], -logsigmoid(every).mean())
        assert metrics["val/pairs"] == len(every)
        assert_close(metrics["val/pair_accuracy_low"], wilson_interval(int((every > 0).sum()), len(every))[0])


def test_short_fit_orders_all_pairs():
    batch = pairs([5, 2, 7, 4, 3, 3], [3, 8, 1, 4, 5, 6])
    module = RewardModule(TinyModel(), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    metrics = fit(module, [batch] * 30).callback_metrics
    assert metrics["train/pair_accuracy"] == 1
    assert metrics["train/loss"] < 0.1


def test_finished_run_exports_the_reward_model(tmp_path):
    module = reward_module()
    module.export(tmp_path)
    loaded = Pretrained(str(tmp_path)).scalar()
    ours = dict(module.reward_model.named_parameters())
    assert all(torch.equal(value, ours[name]) for name, value in loaded.named_parameters())
    module.export(tmp_path / "nothing", write=False)
    assert not (tmp_path / "nothing").exists()
    assert module.parameter_counts() == {"reward_model": sum(p.numel() for p in module.reward_model.parameters())}
