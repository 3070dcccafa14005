"""DPO and IPO: log-ratios of whole answers to the frozen reference; all pairs have the same weight."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from lightning_rlhf import DPOModule, IPOModule, KTOModule, OnlineDPOModule
from lightning_rlhf.extras.algorithms.preference_losses import DPOLoss, IPOLoss, ORPOLoss, SimPOLoss
from lightning_rlhf.functional.diagnostics import calibration_bins, calibration_error
from lightning_rlhf.models.lora import LoRA
from lightning_rlhf.types import PreferenceBatch, SequenceBatch
from tests.helpers import assert_close, over_ranks
from tests.stand_ins import VOCABULARY, OneOfTwoRanks, TinyModel, fit

CHOSEN, REJECTED = [5, 2, 9, 4], [3, 8, 2, 4]


def side(lengths, seed):
    """Return texts whose prompt is the first token; one mask entry in nine is False, as between two turns."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), max(lengths) + 1), generator=draw)
    position, lengths = torch.arange(ids.shape[1]).expand_as(ids), torch.tensor(lengths)
    return SequenceBatch(ids, lengths, (position > 0) & (position < lengths.unsqueeze(1)) & (position != 6))


def pairs(chosen=CHOSEN, rejected=REJECTED, seed=0):
    return PreferenceBatch(side(chosen, seed), side(rejected, seed + 1), torch.zeros(len(chosen)))


def logprobs(texts, lm):
    """Return (B,) log-probabilities of the marked tokens, one text at a time and without padding."""
    result = []
    for ids, length, marked in zip(texts.input_ids, texts.lengths, texts.loss_mask, strict=True):
        scores = lm(ids[None, :length]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:length, None]).squeeze(1)
        result.append(scores[marked[1:length]].sum())
    return torch.stack(result)


def models(dtype="float32"):
    return (TinyModel(seed=seed, dtype=dtype).causal().lm for seed in (0, 1))


def log_ratios(batch, dtype="float32"):
    """Return log-ratios of chosen and rejected, the actor's log-probabilities of both, and the actor."""
    actor, ref = models(dtype)
    policy = [logprobs(texts, actor) for texts in (batch.chosen, batch.rejected)]
    return (
        [a - logprobs(t, ref).detach() for a, t in zip(policy, (batch.chosen, batch.rejected), strict=True)],
        policy,
        actor,
    )


def dpo(kind=DPOModule, dtype="float32", lr=0.0, **options):
    inputs = {"ref": TinyModel(seed=1, dtype=dtype), "optimizer": partial(torch.optim.SGD, lr=lr)} | options
    module = kind(TinyModel(seed=0, dtype=dtype), **inputs)
    module.configure_model()
    return module


def steps_of(module, batches):
    """Return the loss of every step."""
    seen = []

    class Watch(type(module)):
        def finish_step(self, metrics, bar):
            seen.append(metrics["train/loss"])
            super().finish_step(metrics, bar)

    module.__class__ = Watch
    fit(module, batches)
    return seen


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("micro_batch_tokens", [7, 25, 1000])
def test_loss_rewards_and_margin_are_those_of_whole_answers(micro_batch_tokens, packing):
    batch = pairs()
    module = dpo(loss=DPOLoss(0.3), micro_batch_tokens=micro_batch_tokens, packing=packing)
    metrics = fit(module, [batch]).callback_metrics
    (chosen, rejected), policy, _ = log_ratios(batch)
    assert_close(metrics["train/loss"], -logsigmoid(0.3 * (chosen - rejected)).mean())
    assert_close(metrics["train/score_margin"], 0.3 * (chosen - rejected).mean(), atol=1e-6)
    assert_close(metrics["train/pair_accuracy"], (chosen > rejected).float().mean())
    for name, ratio, logprob in zip(("chosen", "rejected"), (chosen, rejected), policy, strict=True):
        assert_close(metrics[f"train/reward_{name}"], 0.3 * ratio.mean(), atol=1e-6)
        assert_close(metrics[f"train/logprob_{name}"], logprob.mean(), rtol=1e-5)


def test_ipo_divides_log_ratios_by_the_marked_tokens():
    batch = pairs()
    metrics = fit(dpo(IPOModule, loss=IPOLoss(0.3)), [batch]).callback_metrics
    ratios, _, _ = log_ratios(batch)
    chosen, rejected = (
        r / texts.loss_mask.sum(1) for r, texts in zip(ratios, (batch.chosen, batch.rejected), strict=True)
    )
    assert_close(metrics["train/loss"], ((chosen - rejected - 1 / 0.6) ** 2).mean())
    assert_close(metrics["train/score_margin"], 0.3 * (ratios[0] - ratios[1]).mean(), atol=1e-6)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 1000])
def test_gradient_is_that_of_the_whole_batch_for_any_token_budget(micro_batch_tokens, packing):
    batch = pairs()
    module = dpo(
        dtype="float64", lr=1.0, micro_batch_tokens=micro_batch_tokens, max_grad_norm=None, loss=DPOLoss(0.3),
        packing=packing,
    )  # fmt: skip
    before = [p.detach().clone() for p in module.actor.parameters()]
    reference = [p.detach().clone() for p in module.ref.parameters()]
    fit(module, [batch])
    taken = [old - new.detach() for old, new in zip(before, module.actor.parameters(), strict=True)]
    (chosen, rejected), _, actor = log_ratios(batch, "float64")
    expected = torch.autograd.grad(-logsigmoid(0.3 * (chosen - rejected)).mean(), list(actor.parameters()))
    assert max(float((one - other).abs().max()) for one, other in zip(taken, expected, strict=True)) <= 1e-12
    assert all(torch.equal(old, new) for old, new in zip(reference, module.ref.parameters(), strict=True))


@pytest.mark.parametrize("lora", [None, LoRA(2, alpha=4)])
def test_run_without_a_separate_reference_starts_without_preference(lora):
    source = TinyModel(lora=lora)
    module = DPOModule(source, optimizer=partial(torch.optim.SGD, lr=0.5), loss=DPOLoss(0.3))
    assert module.frozen_roles == (("ref",) if lora is None else ())
    seen = steps_of(module, [pairs()] * 3)
    assert_close(seen[0], math.log(2))
    assert seen[2] < seen[1] < seen[0]


def test_actor_without_its_adapters_equals_a_separate_reference():
    copy = TinyModel(TinyModel().architecture | {"use_cache": False})  # the same weights, under another description
    seen = []
    for ref, frozen in ((None, ()), (copy, ("ref",))):
        module = DPOModule(
            TinyModel(lora=LoRA(2, alpha=4)), ref=ref, optimizer=partial(torch.optim.AdamW, lr=1e-2), loss=DPOLoss(0.3)
        )
        assert module.frozen_roles == frozen
        seen.append(steps_of(module, [pairs(seed=seed) for seed in (0, 2, 4)]))
    assert_close(*seen, rtol=1e-6)
    assert seen[0][2] != seen[0][0]


def test_held_out_pairs_of_both_ranks_have_equal_weight():
    shares = [[pairs([3], [4], 1), pairs([5, 6, 2], [1, 9, 3], 3)], [pairs([2, 8], [5, 2], 5), pairs([4], [4], 7)]]
    every = torch.cat([torch.sub(*log_ratios(batch)[0]).detach() for share in shares for batch in share])
    modules = [dpo(loss=DPOLoss(0.3), micro_batch_tokens=9) for _ in shares]

    def rank(number, ranks):
        strategy = OneOfTwoRanks(ranks)
        return fit(modules[number], [shares[number][0]], val=shares[number], strategy=strategy).callback_metrics

    for metrics in over_ranks(*(partial(rank, number) for number in (0, 1))):
        assert_close(metrics["val/loss"], -logsigmoid(0.3 * every).mean())
        assert metrics["val/pairs"] == len(every)
        assert_close(metrics["val/pair_accuracy"], (every > 0).float().mean())
        assert_close(metrics["val/pair_calibration_error"], calibration_error(calibration_bins(0.3 * every)), rtol=1e-4)


@pytest.mark.slow
def test_short_fit_learns_the_preferences():
    batch = pairs([5, 2, 7, 4, 3, 3], [3, 8, 1, 4, 5, 6])
    module = DPOModule(TinyModel(), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    metrics = fit(module, [batch] * 30).callback_metrics
    assert metrics["train/pair_accuracy"] == 1
    assert metrics["train/loss"] < 0.3
    assert metrics["train/reward_chosen"] > metrics["train/reward_rejected"] + 1


def test_reference_with_adapters_is_rejected():
    with pytest.raises(ValueError, match=r"^the ref is not trained, so its source cannot have lora"):
        DPOModule(TinyModel(), ref=TinyModel(seed=1, lora=LoRA(2, alpha=4)))


# -- without a reference, and with a supervised term ------------------------------------------------------------------


def token_means(batch, lm):
    """Return the mean log-probability of the tokens of each preferred and each other answer."""
    return [logprobs(texts, lm) / texts.loss_mask.sum(dim=1) for texts in (batch.chosen, batch.rejected)]


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        (SimPOLoss(), {}, lambda a, b: -logsigmoid(2 * (a - b) - 1)),
        (
            ORPOLoss(0.5),
            {"sft_coef": 1.0},
            lambda a, b: -0.5 * logsigmoid((a - b) - (1 - a.exp()).log() + (1 - b.exp()).log()) - a,
        ),
        (DPOLoss(0.3, length_normalized=True), {"ref": "none"}, lambda a, b: -logsigmoid(0.3 * (a - b))),
    ],
)
def test_update_without_reference_is_that_of_the_policys_log_probs(loss, options, expected):
    batch, (lm, _) = pairs(), models()
    expected(*token_means(batch, lm)).mean().backward()
    module = DPOModule(
        TinyModel(), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.5), max_grad_norm=None, **options
    )
    assert module.frozen_roles == ()
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    fit(module, [batch])
    for name, parameter in module.actor.lm.named_parameters():
        assert_close((before[name] - parameter) / 0.5, lm.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_reward_without_reference_is_the_one_of_the_loss():
    batch, (lm, _) = pairs(chosen=[9, 9, 9, 9], rejected=[2, 2, 2, 2]), models()
    chosen, rejected = token_means(batch, lm)
    by_sums = [logprobs(texts, lm) for texts in (batch.chosen, batch.rejected)]
    assert (chosen > rejected).float().mean() != (by_sums[0] > by_sums[1]).float().mean()
    sgd = partial(torch.optim.SGD, lr=0.0)
    metrics = fit(DPOModule(TinyModel(), loss=SimPOLoss(), optimizer=sgd), [batch]).callback_metrics
    assert_close(metrics["train/pair_accuracy"], (chosen > rejected).float().mean())
    assert_close(metrics["train/reward_chosen"], 2 * chosen.mean(), rtol=1e-5)
    assert_close(metrics["train/score_margin"], 2 * (chosen - rejected).mean(), rtol=1e-4)


def test_supervised_term_is_added_to_the_loss_of_each_pair():
    batch = pairs()
    metrics = {coef: fit(dpo(lr=0.0, sft_coef=coef), [batch]).callback_metrics for coef in (0.0, 0.25)}
    actor, _ = models()
    supervised = -token_means(batch, actor)[0].mean()
    assert_close(metrics[0.25]["train/sft_loss"], supervised, rtol=1e-5)
    assert_close(metrics[0.25]["train/loss"], metrics[0.0]["train/loss"] + 0.25 * supervised, rtol=1e-5)
    assert "train/sft_loss" not in metrics[0.0]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DPOModule, {"loss": SimPOLoss(), "ref": TinyModel()}, "SimPOLoss uses no reference: remove ref"),
        (DPOModule, {"sft_coef": -1}, "sft_coef must be at least 0, got -1"),
        (KTOModule, {"ref": "none"}, "KTO needs a reference and has no supervised term"),
        (KTOModule, {"sft_coef": 1.0}, "KTO needs a reference and has no supervised term"),
        (OnlineDPOModule, {"loss": SimPOLoss()}, "OnlineDPOModule compares with a reference, which SimPOLoss does not"),
    ],
)
def test_losses_and_references_that_do_not_fit_raise(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(TinyModel(), **options)
