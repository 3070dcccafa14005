"""KTO: gains and losses against the KL of the whole batch over all ranks."""

from functools import partial

import pytest
import torch

from lightning_rlhf import KTOModule, UnpairedDataModule
from lightning_rlhf.extras.algorithms.kto import with_next_rows_response
from lightning_rlhf.extras.algorithms.preference_losses import KTOLoss
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedBatch
from lightning_rlhf.functional.data_ranks import ONE_RANK
from lightning_rlhf.types import SequenceBatch
from tests.data.rows_given import GivenRows, Letters
from tests.extras.algorithms.test_dpo import logprobs, models
from tests.helpers import assert_close, over_ranks
from tests.stand_ins import VOCABULARY, OneOfTwoRanks, TinyModel, fit, quiet_trainer

LOSS = KTOLoss(0.3, 0.7, 1.6)
LENGTHS, STARTS, LABELS = [6, 3, 9, 5, 7], [2, 1, 3, 4, 2], [True, False, True, False, False]


def batch_of(lengths=LENGTHS, starts=STARTS, labels=LABELS, seed=1):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), max(lengths) + 1), generator=draw)
    position, lengths = torch.arange(ids.shape[1]).expand_as(ids), torch.tensor(lengths)
    marked = (position >= torch.tensor(starts).unsqueeze(1)) & (position < lengths.unsqueeze(1))
    return UnpairedBatch(SequenceBatch(ids, lengths, marked), torch.tensor(labels), torch.arange(len(labels)))


def mismatched_by_hand(batch, starts=STARTS):
    """Return each prompt with the answer of the next text."""
    rows, marks, widest = [], [], int(batch.texts.lengths.max())
    for i, start in enumerate(starts):
        j = (i + 1) % len(starts)
        answer = batch.texts.input_ids[j, starts[j] : batch.texts.lengths[j]].tolist()
        rows.append((batch.texts.input_ids[i, :start].tolist() + answer)[:widest])
        marks.append(([False] * start + [True] * len(answer))[:widest])
    lengths = torch.tensor([len(row) for row in rows])
    ids, marked = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in many], batch_first=True) for many in (rows, marks)
    )
    return SequenceBatch(ids, lengths, marked)


def kto(dtype="float32", lr=0.0, **options):
    inputs = {
        "actor": TinyModel(seed=0, dtype=dtype), "ref": TinyModel(seed=1, dtype=dtype),
        "optimizer": partial(torch.optim.SGD, lr=lr), "loss": LOSS,
    }  # fmt: skip
    module = KTOModule(**(inputs | options))
    module.configure_model()
    return module


def expected_of(batch, dtype="float32"):
    """Return losses, log-ratios, KL and the actor, computed one text at a time."""
    actor, ref = models(dtype)
    ratios = logprobs(batch.texts, actor) - logprobs(batch.texts, ref).detach()
    other = mismatched_by_hand(batch)
    kl = (logprobs(other, actor) - logprobs(other, ref)).mean().detach().clamp(min=0)
    return LOSS(ratios, batch.desirable, kl), ratios, kl, actor


def test_each_prompt_gets_the_answer_of_the_next_text_for_any_order_of_rows():
    batch = batch_of()
    expected = mismatched_by_hand(batch)
    for order in (range(5), (3, 0, 4, 2, 1)):
        result = with_next_rows_response(batch[list(order)], ONE_RANK)
        for at, row in enumerate(order):
            length = int(expected.lengths[row])
            assert int(result.lengths[at]) == length
            assert result.input_ids[at, :length].equal(expected.input_ids[row, :length])
            assert result.loss_mask[at, :length].equal(expected.loss_mask[row, :length])


def test_answer_is_truncated_if_the_text_would_be_the_longest_of_the_batch():
    batch = batch_of([4, 9], [3, 1], [True, False])
    result = with_next_rows_response(batch, ONE_RANK)
    assert result.lengths.tolist() == [9, 2]  # 3 + 6 of 8; 1 + 1
    assert result.input_ids[0, 3:9].equal(batch.texts.input_ids[1, 1:7])


def test_rows_of_several_texts_give_prompt_and_answer_of_their_first_text():
    batch = batch_of()
    expected = with_next_rows_response(batch, ONE_RANK)
    texts, rows = batch.texts, torch.arange(len(batch))
    ids = torch.nn.functional.pad(texts.input_ids, (0, 4), value=3)
    marked, starts = torch.nn.functional.pad(texts.loss_mask, (0, 4)), torch.zeros_like(ids, dtype=torch.bool)
    for text in range(4):
        ids[rows, texts.lengths + text] = 5
        marked[rows, texts.lengths + text] = text > 0
    starts[rows, texts.lengths] = True
    shared = torch.zeros_like(texts.lengths)
    longer = SequenceBatch(ids, texts.lengths + 4, marked, text_starts=starts, shared=shared)
    result = with_next_rows_response(UnpairedBatch(longer, batch.desirable, batch.position), ONE_RANK)
    for name in ("input_ids", "lengths", "loss_mask"):
        assert getattr(result, name).equal(getattr(expected, name)), name


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("micro_batch_tokens", [7, 25, 1000])
def test_loss_rewards_and_kl_are_those_of_single_texts(micro_batch_tokens, packing):
    batch = batch_of()
    metrics = fit(kto(micro_batch_tokens=micro_batch_tokens, packing=packing), [batch], val=[batch]).callback_metrics
    losses, ratios, kl, _ = expected_of(batch)
    assert kl > 0.1
    for prefix in ("train", "val"):
        assert_close(metrics[f"{prefix}/loss"], losses.mean())
        assert_close(metrics[f"{prefix}/kl"], kl)
        rewards = [0.3 * ratios[which].mean() for which in (batch.desirable, ~batch.desirable)]
        assert_close(metrics[f"{prefix}/reward_chosen"], rewards[0], atol=1e-6)
        assert_close(metrics[f"{prefix}/reward_rejected"], rewards[1], atol=1e-6)
        assert_close(metrics[f"{prefix}/score_margin"], rewards[0] - rewards[1], atol=1e-6)


def test_negative_kl_is_replaced_by_0():
    batch = batch_of()
    metrics = fit(kto(ref=TinyModel(seed=0), actor=TinyModel(seed=1)), [batch]).callback_metrics
    _, ratios, kl, _ = expected_of(batch)
    assert kl > 0.1  # of the two models the other way round
    assert metrics["train/kl"] == 0
    assert_close(metrics["train/loss"], LOSS(-ratios, batch.desirable, torch.tensor(0.0)).mean())


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 1000])
def test_gradient_is_that_of_the_whole_batch_without_the_kl(micro_batch_tokens, packing):
    batch = batch_of()
    module = kto("float64", 1.0, micro_batch_tokens=micro_batch_tokens, max_grad_norm=None, packing=packing)
    before = [p.detach().clone() for p in module.actor.parameters()]
    fit(module, [batch])
    taken = [old - new.detach() for old, new in zip(before, module.actor.parameters(), strict=True)]
    losses, _, _, actor = expected_of(batch, "float64")
    expected = torch.autograd.grad(losses.mean(), list(actor.parameters()))
    assert max(float((one - other).abs().max()) for one, other in zip(taken, expected, strict=True)) <= 1e-12


def test_two_ranks_compute_the_same_as_one():
    batch = batch_of()
    one = kto(lr=0.1, max_grad_norm=None)
    alone = fit(one, [batch], val=[batch]).callback_metrics
    shares = [batch[[0, 3]], batch[[1, 2, 4]]]
    modules = [kto(lr=0.1, max_grad_norm=None, micro_batch_tokens=12) for _ in shares]

    def rank(number, ranks):
        strategy = OneOfTwoRanks(ranks)
        return fit(modules[number], [shares[number]], val=[shares[number]], strategy=strategy).callback_metrics

    for metrics in over_ranks(*(partial(rank, number) for number in (0, 1))):
        for name, value in alone.items():
            assert_close(metrics[name], value, rtol=1e-4, atol=1e-5)
    for module in modules:
        pairs = zip(module.actor.parameters(), one.actor.parameters(), strict=True)
        assert max(float((a - b).abs().max().detach()) for a, b in pairs) < 1e-5


def test_labels_of_one_kind_leave_rewards_of_the_other_kind_undefined():
    batch = batch_of(labels=[True] * 5)
    metrics = fit(kto(), [batch]).callback_metrics
    assert metrics["train/reward_chosen"].isfinite()
    assert metrics["train/reward_rejected"].isnan()
    assert metrics["train/score_margin"].isnan()


def test_single_held_out_row_is_rejected():
    row = {"prompt": "a", "completion": "b", "label": True}
    data = UnpairedDataModule(train=GivenRows([row] * 2), val=GivenRows([row]), tokenizer=Letters(), batch_size=2)
    with pytest.raises(ValueError, match=r"responses of other texts: val has one row, use at least 2$"):
        quiet_trainer().fit(KTOModule(TinyModel()), datamodule=data)


@pytest.mark.parametrize("sizes", [{"batch_size": 1}, {"batch_size": 2, "val_batch_size": 1}])
def test_batches_of_one_text_are_rejected_before_any_model_is_built(sizes):
    row = {"prompt": "a", "completion": "b", "label": True}
    module = KTOModule(TinyModel())
    with pytest.raises(ValueError, match=f"responses of other texts: {list(sizes)[-1]} must be at least 2$"):
        quiet_trainer().fit(module, datamodule=UnpairedDataModule(GivenRows((row,) * 2), Letters(), **sizes))
    assert not module.built


@pytest.mark.slow
def test_short_fit_separates_good_and_bad_answers():
    module = KTOModule(TinyModel(), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    metrics = fit(module, [batch_of()] * 30).callback_metrics
    assert metrics["train/score_margin"] > 0.5
    assert metrics["train/loss"] < 0.4
