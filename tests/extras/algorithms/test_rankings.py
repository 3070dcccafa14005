"""Reward modelling from rankings: rows of different lengths, exact over micro-batches and ranks, and their metrics."""

from functools import partial

import pytest
import torch

from lightning_rlhf import PreferenceDataModule, RankingDataModule, RankingRewardModule, RewardModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.algorithms.ranking_losses import AllPairsLoss, PlackettLuceLoss
from lightning_rlhf.extras.algorithms.rankings import Order, RankingAccuracy, RankingBatch
from lightning_rlhf.functional.samples import wilson_interval
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.objectives.pairwise_loss import PairwiseLoss
from lightning_rlhf.types import PreferenceBatch, SequenceBatch
from tests.helpers import assert_close, over_ranks
from tests.stand_ins import VOCABULARY, OneOfTwoRanks, TinyModel, fit, quiet_trainer

LOSSES = {"all pairs": AllPairsLoss(PairwiseLoss(0.1)), "plackett luce": PlackettLuceLoss(0.1)}
# Two to four answers, with ties; the lengths of their texts.
RANKS = ((1, 2), (2, 1, 1, 3), (1, 3, 2), (1, 2, 2))
LENGTHS = ((5, 3), (2, 8, 3, 4), (7, 1, 6), (4, 4, 2))


def batch_of(ranks=RANKS, lengths=LENGTHS, seed=0):
    flat = [length for row in lengths for length in row]
    ids = torch.randint(VOCABULARY, (len(flat), max(flat)), generator=torch.Generator().manual_seed(seed))
    texts = SequenceBatch(ids, torch.tensor(flat), torch.zeros(ids.shape).bool())
    width = max(map(len, ranks))
    return RankingBatch.of(texts, torch.tensor([[*row, *[0] * (width - len(row))] for row in ranks]))


def scores_of(batch, lm):
    """Return the score of each answer of each row, one text at a time and without padding."""
    table = []
    for ids, lengths in zip(batch.input_ids, batch.lengths, strict=True):
        texts = [text[:length] for text, length in zip(ids, lengths.tolist(), strict=True) if length]
        table.append(torch.stack([lm.score(lm.model(text[None]).last_hidden_state)[0, -1, 0] for text in texts]))
    return table


def module_of(loss=AllPairsLoss(), dtype="float32", lr=0.0, **options):  # noqa: B008 (frozen)
    module = RankingRewardModule(TinyModel(dtype=dtype), loss, optimizer=partial(torch.optim.SGD, lr=lr), **options)
    module.configure_model()
    return module


def test_batches_keep_rows_together_and_count_their_tokens():
    batch = batch_of()
    assert len(batch) == 4
    assert batch.real_lengths.tolist() == [8, 17, 14, 10]
    assert batch.total_lengths.tolist() == [20, 32, 28, 16]  # four answers are the most
    part = batch[[3, 0]]
    assert part.ranks.tolist() == [[1, 2, 2, 0], [1, 2, 0, 0]]
    assert part.texts.lengths.tolist() == [4, 4, 2, 5, 3]
    assert torch.equal(RankingBatch.of(part.texts, part.ranks).input_ids, part.input_ids)
    with pytest.raises(ValueError, match=r"^RankingBatch.ranks has shape \(4, 3\), expected \(4, 4\)$"):
        RankingBatch(batch.input_ids, batch.lengths, batch.loss_mask, batch.ranks[:, :3])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("options", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 20}, {"packing": False}])
def test_gradient_is_that_of_the_whole_batch_for_any_token_budget(name, options):
    batch = batch_of()
    module = module_of(LOSSES[name], "float64", 1.0, max_grad_norm=None, **options)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    metrics = fit(module, [batch]).callback_metrics
    taken = [old - new.detach() for old, new in zip(before, module.parameters(), strict=True)]

    lm = TinyModel(dtype="float64").scalar().lm
    losses = [
        LOSSES[name](scores[None], torch.tensor([ranks]))[0]
        for scores, ranks in zip(scores_of(batch, lm), RANKS, strict=True)
    ]
    loss = torch.stack(losses).mean()
    expected = torch.autograd.grad(loss, list(lm.parameters()))
    assert max(float((one - other).abs().max()) for one, other in zip(taken, expected, strict=True)) <= 1e-12
    assert_close(metrics["train/loss"], loss)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", LOSSES)
def test_two_ranks_with_different_answers_take_the_step_of_one(name):
    batch = batch_of()
    modules = [module_of(LOSSES[name], "float64", 1.0, max_grad_norm=None) for _ in range(3)]
    alone = fit(modules[2], [batch]).callback_metrics
    shares = [batch[[0, 3]], batch[[1, 2]]]

    def rank(number, ranks):
        strategy = OneOfTwoRanks(ranks)
        return fit(modules[number], [shares[number]], val=[shares[number]], strategy=strategy).callback_metrics

    for metrics in over_ranks(*(partial(rank, number) for number in (0, 1))):
        for metric in ("loss", "pair_accuracy", "top_1_accuracy", "score_margin"):
            assert_close(metrics[f"train/{metric}"], alone[f"train/{metric}"], rtol=1e-9)
        assert (metrics["val/rankings"], metrics["val/pairs"]) == (4, 1 + 5 + 3 + 2)


@pytest.mark.parametrize("name", LOSSES)
def test_pairs_train_as_with_reward_module(name):
    words = ["abc", "cab", "c", "ca", "bb"]
    pairs = [{"prompt": word, "chosen": word + "a", "rejected": "ba"[: 1 + len(word) % 2]} for word in words]
    ranked = [{"prompt": p["prompt"], "responses": [p["rejected"], p["chosen"]], "scores": [1, 2]} for p in pairs]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    of_pairs = RewardModule(TinyModel(), PairwiseLoss(0.1), optimizer=optimizer)
    of_rankings = RankingRewardModule(TinyModel(), LOSSES[name], optimizer=optimizer)
    logged = []
    for module, kind, rows in ((of_pairs, PreferenceDataModule, pairs), (of_rankings, RankingDataModule, ranked)):
        data = kind(InMemory(rows), CharacterTokenizer("abc"), val=InMemory(rows), batch_size=2)
        trainer = quiet_trainer(max_epochs=2)
        trainer.fit(module, datamodule=data)
        logged.append(trainer.callback_metrics)
    names = [name for name in logged[0] if not name.startswith("perf/")]
    assert {"val/loss", "val/pairs", "val/pair_accuracy_low", "val/pair_calibration_error"} < set(names)
    for name in names:
        assert_close(logged[1][name], logged[0][name], rtol=1e-5, atol=1e-6)


def test_metrics_of_a_case_worked_by_hand():
    # (1, 2, 2): 3 > 1 and 3 = 3: one of two pairs, not the highest alone. (2, 1, 1): -1 < 0, 2: both; (3, 1, 2): none
    scores = torch.tensor([[3.0, 1.0, 3.0, 99.0], [-1.0, 0.0, 2.0, 99.0], [5.0, 1.0, 2.0, 99.0]])
    order = Order.of(scores, torch.tensor([[1, 2, 2, 0], [2, 1, 1, 0], [3, 1, 2, 0]]))
    assert order.pairs.tolist() == [2, 2, 3]
    assert_close(order.correct_fraction, [0.5, 1, 0])
    assert_close(order.margin, [1, 2, (-4 - 3 - 1) / 3])
    assert order.top_1.tolist() == [False, True, False]
    accuracy = RankingAccuracy()
    accuracy.update(order.correct_fraction, order.pairs)
    low, high = wilson_interval(1.5, 3)
    assert accuracy.compute() == {"rankings": 3, "pairs": 7, "accuracy": 0.5, "low": low, "high": high}
    nothing = RankingAccuracy()
    nothing.update(torch.empty(0), torch.empty(0))
    assert nothing.compute()["rankings"] == 0


def test_validation_weights_every_ranking_of_ragged_batches_equally():
    batches = [batch_of(RANKS[:1], LENGTHS[:1], 1), batch_of(RANKS[1:], LENGTHS[1:], 2)]
    lm = TinyModel().scalar().lm
    rows = [(s, torch.tensor(r)) for b, some in zip(batches, (RANKS[:1], RANKS[1:]), strict=True)
            for s, r in zip(scores_of(b, lm), some, strict=True)]  # fmt: skip
    fractions, tops = [], []
    for scores, ranks in rows:
        pairs = [(scores[i] > scores[j]) for i in range(len(ranks)) for j in range(len(ranks)) if ranks[i] < ranks[j]]
        fractions.append(float(sum(pairs)) / len(pairs))
        tops.append(float(ranks[scores.argmax()] == 1))
    metrics = fit(module_of(), [batches[0]], val=batches).callback_metrics
    assert_close(metrics["val/pair_accuracy"], sum(fractions) / 4)
    assert_close(metrics["val/top_1_accuracy"], sum(tops) / 4)
    assert (metrics["val/rankings"], metrics["val/pairs"]) == (4, 11)
    bounds = torch.stack([metrics["val/pair_accuracy_low"], metrics["val/pair_accuracy_high"]])
    assert_close(bounds, torch.tensor(wilson_interval(sum(fractions), 4)))


@pytest.mark.parametrize("name", LOSSES)
def test_short_fit_orders_all_answers(name):
    module = RankingRewardModule(TinyModel(), LOSSES[name], optimizer=partial(torch.optim.AdamW, lr=2e-2))
    metrics = fit(module, [batch_of()] * 20).callback_metrics
    assert metrics["train/pair_accuracy"] == 1
    assert metrics["train/top_1_accuracy"] == 1


def test_finished_run_exports_a_reward_model(tmp_path):
    module = module_of()
    module.export(tmp_path)
    ours = dict(module.reward_model.named_parameters())
    assert all(torch.equal(value, ours[name]) for name, value in Pretrained(str(tmp_path)).scalar().named_parameters())


def test_pairs_and_too_many_ties_are_rejected_before_the_run():
    rows = [{"prompt": "a", "responses": [*"aaaaaaaaaaab"], "ranks": [1] * 11 + [2]}]
    data = RankingDataModule(InMemory(rows), CharacterTokenizer("ab"), batch_size=1)
    with pytest.raises(ValueError, match="11 tied answers"):
        quiet_trainer().fit(RankingRewardModule(TinyModel(), PlackettLuceLoss()), datamodule=data)
    pairs = PreferenceDataModule(InMemory([{"prompt": "a", "chosen": "a", "rejected": "b"}]), CharacterTokenizer("ab"))
    with pytest.raises(ValueError, match="use RankingDataModule as data module"):
        quiet_trainer().fit(RankingRewardModule(TinyModel()), datamodule=pairs)
    with pytest.raises(ValueError, match="use PreferenceDataModule as data module"):
        quiet_trainer().fit(RewardModule(TinyModel()), datamodule=data)
    assert RewardModule.reads is PreferenceBatch
