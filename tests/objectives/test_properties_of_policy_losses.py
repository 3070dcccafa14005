"""What every policy loss must keep to: its paper's formula, written as loops over responses, and what no batch changes.

The loops know no mask, no clamp and no tensor of tokens: they multiply the probabilities of a list of tokens, and
autograd differentiates what they return.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.objectives.aggregation import (
    Aggregation,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
    TokenSum,
)
from lightning_rlhf.objectives.base import PolicyLoss
from lightning_rlhf.objectives.covariance_policy_losses import ClipCovLoss, KLCovLoss
from lightning_rlhf.objectives.policy_losses import (
    CISPOLoss,
    ClippedPolicyLoss,
    DPPOBernoulliKLLoss,
    DPPOTotalVariationLoss,
    DROLoss,
    ReinforceLoss,
    SAPOLoss,
)
from lightning_rlhf.objectives.sequence_policy_losses import GMPOLoss, GSPOLoss, LUSPOLoss, VESPOLoss
from tests.helpers import assert_close, float64, masks, normal, pad_columns, properties, seeds, with_garbage


def bounded(value, low, high):
    return min(max(value, float64(low)), float64(high))


def clipped(ratio, a, low, high):
    return -min(ratio * a, bounded(ratio, 1 - low, 1 + high) * a)


def ppo(new, old, a, selected_tokens):
    loss = clipped((new - old).exp(), a, 0.1, 0.4)
    return min(loss, -a * 1.5) if a < 0 else loss


def cispo(new, old, a, selected_tokens):
    return -bounded((new.exp() / old.exp()).detach(), 1 - 0.3, 1 + 0.5) * a * new


def sapo(new, old, a, selected_tokens):
    tau = 1.1 if a > 0 else 1.6
    return -a * (4 / tau) / (1 + (-tau * (new.exp() / old.exp() - 1)).exp())


def dppo(diverged, low, high, cap):
    def of_token(new, old, a, selected_tokens):
        p, q = math.exp(new.item()), math.exp(old)
        leaves = p > q and diverged(p, q) > high if a > 0 else p < q and diverged(p, q) > low
        return 0 * new if leaves else -a * min(p / q, cap) * new

    return of_token


def bernoulli_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def gspo(new, old, a, selected_tokens):
    ratio = math.prod(n.exp() / o.exp() for n, o in zip(new, old, strict=True)) ** (1 / len(new))
    return clipped(ratio, a[0], 0.05, 0.1)


def gmpo(new, old, a, selected_tokens):
    product = 1.0
    for n, o in zip(new, old, strict=True):
        ratio = n.exp() / o.exp()
        product = product * (bounded(ratio, 0, math.exp(0.4)) if a[0] > 0 else bounded(ratio, math.exp(-0.3), math.inf))
    return -a[0] * product ** (1 / len(new))


def vespo(new, old, a, selected_tokens):
    whole = math.prod((n.exp() / o.exp()).item() for n, o in zip(new, old, strict=True))
    k, decay = (2.0, 3.0) if a[0] >= 0 else (3.0, 2.0)
    return -(whole**k) * math.exp(decay * (1 - whole)) * a[0] * sum(new)


def over_tokens(of_token):
    """The mean over all tokens."""

    def of_batch(responses):
        losses = [of_token(*token) for response in responses for token in zip(*response, strict=True)]
        return sum(losses) / max(len(losses), 1)

    return of_batch


def over_responses(of_response):
    """The mean over responses that have a token."""

    def of_batch(responses):
        return sum(of_response(*response) for response in responses) / max(len(responses), 1)

    return of_batch


def of_mean_token(of_token):
    """A response's loss: the mean of its tokens'."""
    return lambda *response: sum(of_token(*token) for token in zip(*response, strict=True)) / len(response[0])


class Case(NamedTuple):
    loss: PolicyLoss
    aggregation: Aggregation
    paper: Callable[[list[Any]], Any]
    whole: bool = False  # one advantage for a response


CASES = {
    "ppo": Case(ClippedPolicyLoss(0.2, 0.1, 0.4, 1.5), TokenMean(), over_tokens(ppo)),
    "reinforce": Case(ReinforceLoss(), TokenMean(), over_tokens(lambda new, old, a, selected_tokens: -a * new)),
    "cispo": Case(CISPOLoss(0.3, 0.5), TokenMean(), over_tokens(cispo)),
    "sapo": Case(SAPOLoss(1.1, 1.6), SequenceMeanTokenMean(), over_responses(of_mean_token(sapo))),
    "dro": Case(
        DROLoss(0.7),
        TokenMean(),
        over_tokens(lambda new, old, a, selected_tokens: -(new * a - 0.7 / 2 * (new - old) ** 2)),
    ),
    "dppo_tv": Case(
        DPPOTotalVariationLoss(0.05, 0.1, 1.3), TokenMean(), over_tokens(dppo(lambda p, q: abs(p - q), 0.05, 0.1, 1.3))
    ),
    "dppo_kl": Case(
        DPPOBernoulliKLLoss(0.01, 0.03, 1.3), TokenMean(), over_tokens(dppo(bernoulli_kl, 0.01, 0.03, 1.3))
    ),
    "gspo": Case(GSPOLoss(0.05, 0.1), SequenceMeanTokenMean(), over_responses(gspo), whole=True),
    "luspo": Case(
        LUSPOLoss(0.05, 0.1),
        SequenceMeanTokenSum(),
        over_responses(lambda new, *rest: len(new) * gspo(new, *rest)),
        whole=True,
    ),
    "gmpo": Case(GMPOLoss(0.3, 0.4), SequenceMeanTokenMean(), over_responses(gmpo), whole=True),
    "vespo": Case(VESPOLoss(), SequenceMeanTokenSum(), over_responses(vespo), whole=True),
    "clip_cov": Case(
        ClipCovLoss(0.2, 0.1, 0.4, 1.5),
        TokenMean(),
        over_tokens(
            lambda new, old, a, selected_tokens: 0 * new if selected_tokens else ppo(new, old, a, selected_tokens)
        ),
    ),
    "kl_cov": Case(
        KLCovLoss(kl_coef=0.3),
        TokenMean(),
        over_tokens(
            lambda new, old, a, selected_tokens: (
                -a * (new - old).exp() + (0.3 * abs(new - old) if selected_tokens else 0)
            )
        ),
    ),
}
every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Batch(NamedTuple):
    """The arguments of a policy loss."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    selected_tokens: torch.Tensor

    def map(self, function):
        return Batch(*(function(tensor) for tensor in self))


def make_batch(mask, seed, whole):
    old = -normal(*mask.shape, seed=seed).abs() - 0.01
    new = (old + 0.5 * normal(*mask.shape, seed=seed + 1)).clamp(max=-1e-3)
    advantages = normal(*mask.shape, seed=seed + 2)
    if whole:
        advantages = advantages[:, :1].expand(mask.shape)
    return Batch(new, old, advantages, mask, mask & (normal(*mask.shape, seed=seed + 3) > 0.5))


def value_and_gradient(case, batch, pieces=None):
    """The aggregated loss of a batch, worked out in pieces of rows, and its gradient."""
    leaf = batch.logprobs.clone().requires_grad_()
    batch = batch._replace(logprobs=leaf)
    total = torch.zeros(())
    for rows in torch.arange(len(leaf)).split(pieces or len(leaf)):
        piece = batch.map(operator.itemgetter(rows))
        loss, _ = case.loss(*piece)
        total = total + (loss * case.aggregation.weights(piece.mask)).sum()
    total = total / case.aggregation.denominator(batch.mask)
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


@every_loss
@properties
@given(mask=masks(), seed=seeds)
def test_value_and_gradient_are_those_of_the_papers_loop(case, mask, seed):
    batch = make_batch(mask, seed, case.whole)
    value, gradient = value_and_gradient(case, batch)
    leaf = batch.logprobs.clone().requires_grad_()
    responses = [
        [[row[t] for t in range(mask.shape[1]) if counts[t]] for row in rows]
        for *rows, counts in zip(leaf, batch.old_logprobs, batch.advantages, batch.selected_tokens, mask, strict=True)
        if counts.any()
    ]
    expected = case.paper(responses) + 0 * leaf.sum()  # a number even where every token is clipped
    assert_close(value, expected, rtol=1e-9, atol=1e-12)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@every_loss
@properties
@given(mask=masks(), seed=seeds, columns=st.integers(1, 3))
def test_neither_padding_nor_the_order_of_responses_matters(case, mask, seed, columns):
    batch = make_batch(mask, seed, case.whole)
    value, gradient = value_and_gradient(case, batch)
    padded = value_and_gradient(case, batch.map(lambda tensor: pad_columns(tensor, columns)))
    assert_close(padded[0], value, rtol=1e-9, atol=1e-12)
    assert_close(padded[1], pad_columns(gradient, columns), rtol=1e-9, atol=1e-12)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    permuted = value_and_gradient(case, batch.map(lambda tensor: tensor[order]))
    assert_close(permuted[0], value, rtol=1e-9, atol=1e-12)
    assert_close(permuted[1], gradient[order], rtol=1e-9, atol=1e-12)


@every_loss
@pytest.mark.parametrize("aggregation", [TokenMean(), TokenSum(), SequenceMeanTokenSum(8.0), SequenceMeanTokenMean()])
@settings(properties, max_examples=10)
@given(mask=masks(min_rows=2), seed=seeds, pieces=st.integers(1, 4))
def test_micro_batches_do_not_change_the_gradient(case, aggregation, mask, seed, pieces):
    case = case._replace(aggregation=aggregation)
    batch = make_batch(mask, seed, case.whole)
    whole, in_pieces = value_and_gradient(case, batch), value_and_gradient(case, batch, pieces)
    assert_close(in_pieces[0], whole[0], rtol=1e-9, atol=1e-12)
    assert_close(in_pieces[1], whole[1], rtol=1e-9, atol=1e-12)


@every_loss
@properties
@given(mask=masks(), seed=seeds)
def test_what_lies_outside_the_mask_may_be_anything(case, mask, seed):
    clean = make_batch(mask, seed, case.whole)
    dirty = Batch(*(with_garbage(tensor, mask) for tensor in clean[:3]), mask, clean.selected_tokens)
    for expected, actual in zip(value_and_gradient(case, clean), value_and_gradient(case, dirty), strict=True):
        assert_close(actual, expected, rtol=1e-12, atol=0)
    loss, diagnostics = case.loss(*dirty)
    for tensor in (loss, *diagnostics.values()):
        assert tensor.isfinite().all()


@every_loss
@properties
@given(mask=masks(), seed=seeds)
def test_at_ratio_1_the_gradient_is_the_policy_gradient(case, mask, seed):
    batch = make_batch(mask, seed, case.whole)
    batch = batch._replace(old_logprobs=batch.logprobs, selected_tokens=torch.zeros_like(mask))
    _, gradient = value_and_gradient(case, batch)
    weights = case.aggregation.weights(mask) / case.aggregation.denominator(mask)
    assert_close(gradient, -batch.advantages * weights, rtol=1e-9, atol=1e-12)


@every_loss
@properties
@given(mask=masks(), seed=seeds)
def test_zero_advantage_gives_zero_gradient(case, mask, seed):
    batch = make_batch(mask, seed, case.whole)
    # The penalties of these two do not ask for an advantage.
    if isinstance(case.loss, DROLoss):
        batch = batch._replace(old_logprobs=batch.logprobs)
    if isinstance(case.loss, KLCovLoss):
        batch = batch._replace(selected_tokens=torch.zeros_like(mask))
    value, gradient = value_and_gradient(case, batch._replace(advantages=torch.zeros_like(batch.advantages)))
    assert_close(value, 0.0)
    assert_close(gradient, torch.zeros_like(gradient))


EXTREMES = [-math.inf, -1e30, -1e4, -21.0, 0.0, 21.0, 1e4, 1e30, math.inf]


@every_loss
@pytest.mark.parametrize("advantage", [-1e3, 0.0, 1e3])
def test_infinite_and_huge_differences_give_finite_losses_and_gradients(case, advantage):
    new, old = torch.cartesian_prod(torch.tensor(EXTREMES), torch.tensor(EXTREMES)).unbind(dim=1)
    everywhere = torch.ones(9, 9, dtype=torch.bool)
    for selected_tokens in (everywhere, ~everywhere):
        logprobs = new.view(9, 9).clone().requires_grad_()
        loss, diagnostics = case.loss(
            logprobs, old.view(9, 9), torch.full((9, 9), advantage), everywhere, selected_tokens
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        for tensor in (loss, gradient, *diagnostics.values()):
            assert tensor.dtype == torch.float32
            assert tensor.isfinite().all()


@every_loss
@properties
@given(seed=seeds)
def test_a_number_that_is_none_is_not_hidden(case, seed):
    batch = make_batch(torch.ones(2, 3, dtype=torch.bool), seed, case.whole)
    batch.logprobs[0, 1] = torch.nan
    loss, _ = case.loss(*batch._replace(selected_tokens=torch.zeros_like(batch.mask)))
    assert loss[0].isnan().any()
    assert loss[1].isfinite().all()


@every_loss
def test_a_batch_without_a_policy_token_has_loss_and_gradient_0(case):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    empty = torch.full((2, 3), torch.nan).double()
    value, gradient = value_and_gradient(case, Batch(empty, empty, empty, mask, mask))
    assert_close(value, 0.0)
    assert_close(gradient, torch.zeros(2, 3))


@every_loss
@properties
@given(mask=masks(), seed=seeds)
def test_diagnostics_are_floats_of_tokens_without_gradient(case, mask, seed):
    batch = make_batch(mask, seed, case.whole)
    batch.logprobs.requires_grad_()
    loss, diagnostics = case.loss(*batch)
    assert loss.shape == mask.shape
    for value in diagnostics.values():
        assert value.shape == mask.shape
        assert value.dtype == loss.dtype
        assert not value.requires_grad
    difference = (batch.logprobs - batch.old_logprobs).detach()[mask]
    assert_close(diagnostics["approx_kl"][mask], difference.exp() - 1 - difference, rtol=1e-9, atol=1e-12)


@every_loss
def test_nothing_chosen_is_the_same_as_no_choice(case):
    batch = make_batch(torch.ones(3, 4, dtype=torch.bool), 0, case.whole)
    selected_tokens = case.loss(*batch._replace(selected_tokens=torch.zeros_like(batch.mask)))
    none = case.loss(*batch[:4])
    assert_close(none[0], selected_tokens[0])
    assert none[1].keys() == selected_tokens[1].keys()
    for name, value in none[1].items():
        assert_close(value, selected_tokens[1][name])


@every_loss
def test_hyper_parameters_cannot_change(case):
    with pytest.raises(FrozenInstanceError):
        case.loss.clip_range_low = 0.5


def test_only_the_covariance_losses_choose_tokens():
    assert [name for name, case in CASES.items() if case.loss.selects_tokens] == ["clip_cov", "kl_cov"]


def test_only_the_plain_policy_gradient_has_no_ratio():
    assert [name for name, case in CASES.items() if not case.loss.uses_ratio] == ["reinforce"]
