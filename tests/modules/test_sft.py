"""Supervised fine-tuning: exact mean of the cross-entropy of marked tokens."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_rlhf import ConversationDataModule, PreferenceDataModule, RewardModule, SFTModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.types import SequenceBatch
from tests.helpers import assert_close, over_ranks
from tests.stand_ins import VOCABULARY, OneOfTwoRanks, TinyModel, fit, quiet_trainer

LETTERS = CharacterTokenizer("abcdefghi")


def texts(lengths, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), max(lengths) + 2), generator=draw)
    lengths = torch.tensor(lengths)
    position = torch.arange(ids.shape[1]).expand_as(ids)
    marked = torch.rand(ids.shape, generator=draw) < 0.6
    return SequenceBatch(ids, lengths, marked & (position > 0) & (position < lengths.unsqueeze(1)))


def marked_losses(batch):
    """Return torch's cross-entropy of every marked token under the untrained model."""
    lm = TinyModel().causal().lm
    logits = lm(batch.input_ids).logits[:, :-1]
    return cross_entropy(
        logits[batch.loss_mask[:, 1:]], batch.input_ids[:, 1:][batch.loss_mask[:, 1:]], reduction="none"
    )


def sft(**options):
    module = SFTModule(TinyModel(), **({"optimizer": partial(torch.optim.SGD, lr=0.0)} | options))
    module.configure_model()
    return module


@pytest.mark.parametrize("micro_batch_tokens", [5, 1000])
def test_training_loss_equals_the_cross_entropy_of_marked_tokens_in_torch(micro_batch_tokens):
    batch = texts([5, 9, 3], seed=0)
    metrics = fit(sft(micro_batch_tokens=micro_batch_tokens), [batch]).callback_metrics
    assert_close(metrics["train/loss"], marked_losses(batch).mean())


def test_validation_loss_weights_every_token_of_ragged_batches_equally():
    batches = [texts([3, 2], 1), texts([12, 11, 9, 8], 2), texts([7], 3)]
    every = torch.cat([marked_losses(batch) for batch in batches])
    assert abs(torch.stack([marked_losses(batch).mean() for batch in batches]).mean() - every.mean()) > 1e-2
    metrics = fit(sft(), [texts([4], 0)], val=batches).callback_metrics
    assert_close(metrics["val/loss"], every.mean())


def test_validation_loss_weights_every_token_of_both_ranks_equally():
    shares = [[texts([3, 2], 1), texts([12, 9], 2)], [texts([11], 3), texts([2, 2, 4], 4)]]
    every = torch.cat([marked_losses(batch) for share in shares for batch in share])
    modules = [sft() for _ in shares]

    def rank(number, ranks):
        strategy = OneOfTwoRanks(ranks)
        return fit(modules[number], [texts([4], 0)], val=shares[number], strategy=strategy).callback_metrics

    for metrics in over_ranks(*(partial(rank, number) for number in (0, 1))):
        assert_close(metrics["val/loss"], every.mean())


def test_short_fit_lowers_the_loss():
    batch = texts([5, 9, 3], seed=0)
    module = sft(optimizer=partial(torch.optim.AdamW, lr=1e-2))
    losses = []

    class Watch(SFTModule):
        def finish_step(self, metrics, bar):
            losses.append(metrics["train/loss"])
            super().finish_step(metrics, bar)

    module.__class__ = Watch
    fit(module, [batch] * 30)
    assert losses[-1] < 0.2 * losses[0]
    assert losses[0] == pytest.approx(marked_losses(batch).mean().item(), rel=1e-5)


def test_batch_of_single_tokens_has_no_targets():
    batch = SequenceBatch(torch.tensor([[3], [4]]), torch.tensor([1, 1]), torch.zeros(2, 1).bool())
    metrics = fit(sft(), [batch], val=[batch]).callback_metrics
    assert metrics["train/loss"].isnan()
    assert metrics["val/loss"].isnan()


@pytest.mark.parametrize(
    ("module", "data", "role"),
    [
        (
            SFTModule(TinyModel()),
            ConversationDataModule(InMemory([{"prompt": "a", "completion": "b"}]), LETTERS),
            "actor",
        ),
        (
            RewardModule(TinyModel()),
            PreferenceDataModule(InMemory([{"prompt": "a", "chosen": "b", "rejected": "c"}]), LETTERS),
            "reward_model",
        ),
    ],
    ids=["sft", "reward"],
)
def test_tokenizer_with_more_tokens_than_the_model_is_rejected_before_the_model_is_built(module, data, role):
    with pytest.raises(ValueError, match=f"^the tokenizer has 13 tokens, the {role} only 11: use the tokenizer that"):
        quiet_trainer().fit(module, datamodule=data)
    assert not module.built


def test_wrong_data_module_is_reported_before_its_columns_are_read():
    data = PreferenceDataModule(InMemory([{"prompt": "a", "completion": "b"}]), LETTERS)
    with pytest.raises(
        ValueError, match=r"^SFTModule cannot train on the rows of PreferenceDataModule: use ConversationDataModule as"
    ):
        quiet_trainer().fit(SFTModule(TinyModel()), datamodule=data)


# -- dynamic fine-tuning ----------------------------------------------------------------------------------------------


def test_dynamic_fine_tuning_weights_each_token_by_its_probability():
    batch = texts([5, 9, 3], seed=0)
    lm = TinyModel().causal().lm
    total, tokens = torch.zeros(()), 0
    for ids, length, marked in zip(batch.input_ids, batch.lengths, batch.loss_mask, strict=True):
        scores = lm(ids[None, :length]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:length, None]).squeeze(1)
        for logprob in scores[marked[1:length]]:
            total = total - float(logprob.detach().exp()) * logprob
            tokens += 1
    (total / tokens).backward()
    module = SFTModule(TinyModel(), loss="dft", optimizer=partial(torch.optim.SGD, lr=0.5), max_grad_norm=None)
    metrics = fit(module, [batch]).callback_metrics
    before = TinyModel().causal().lm
    for name, parameter in module.actor.lm.named_parameters():
        gradient = (before.get_parameter(name) - parameter) / 0.5
        assert_close(gradient, lm.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    plain = SFTModule(TinyModel(), optimizer=partial(torch.optim.SGD, lr=0.0))
    assert_close(metrics["train/loss"], fit(plain, [batch]).callback_metrics["train/loss"])  # the same measure


def test_unknown_loss_raises():
    with pytest.raises(ValueError, match="loss of SFTModule must be cross_entropy or dft, got 'sum'"):
        SFTModule(TinyModel(), loss="sum")
