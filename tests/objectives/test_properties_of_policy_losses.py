"""Every policy loss equals its formula as loops over responses, and is independent of the batch layout."""

import math
import operator
from dataclasses import FrozenInstanceError
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.extras.algorithms.covariance_policy_losses import HighEntropyLoss, KLCovLoss
from lightning_rlhf.extras.algorithms.policy_losses import DROLoss
from lightning_rlhf.objectives.aggregation import (
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
    TokenSum,
)
from lightning_rlhf.objectives.base import PolicyLoss
from tests.extras.algorithms import test_covariance_policy_losses as covariance
from tests.extras.algorithms import test_sequence_policy_losses as sequence
from tests.helpers import (
    assert_close,
    concrete_objectives,
    masks,
    normal,
    pad_columns,
    properties,
    seeds,
    with_garbage,
)
from tests.objectives import test_token_policy_losses as token

CASES = token.CASES | sequence.CASES | covariance.CASES
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


def without_change(case, mask):
    """Return the selection with which a loss is the same for all tokens."""
    return mask.clone() if isinstance(case.loss, HighEntropyLoss) else torch.zeros_like(mask)


def value_and_gradient(case, batch, pieces=None):
    """Return the aggregated loss of a batch, computed in pieces of rows, and its gradient."""
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


@pytest.mark.quick_cases(7)
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


@pytest.mark.quick_cases(14)
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


@pytest.mark.quick_cases(7)
@every_loss
@properties
@given(mask=masks(), seed=seeds)
def test_values_outside_the_mask_may_be_anything(case, mask, seed):
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
    batch = batch._replace(old_logprobs=batch.logprobs, selected_tokens=without_change(case, mask))
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
def test_nan_is_not_hidden(case, seed):
    batch = make_batch(torch.ones(2, 3, dtype=torch.bool), seed, case.whole)
    batch.logprobs[0, 1] = torch.nan
    loss, _ = case.loss(*batch._replace(selected_tokens=without_change(case, batch.mask)))
    assert loss[0].isnan().any()
    assert loss[1].isfinite().all()


@every_loss
def test_batch_without_a_policy_token_has_loss_and_gradient_0(case):
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
def test_empty_selection_equals_no_selection(case):
    batch = make_batch(torch.ones(3, 4, dtype=torch.bool), 0, case.whole)
    selected_tokens = case.loss(*batch._replace(selected_tokens=torch.zeros_like(batch.mask)))
    none = case.loss(*batch[:4])
    assert_close(none[0], selected_tokens[0])
    assert none[1].keys() == selected_tokens[1].keys()
    for name, value in none[1].items():
        assert_close(value, selected_tokens[1][name])


@every_loss
def test_hyper_parameters_are_immutable(case):
    with pytest.raises(FrozenInstanceError):
        case.loss.clip_range_low = 0.5


def test_only_the_losses_of_a_whole_mini_batch_select_tokens():
    names = [name for name, case in CASES.items() if case.loss.selects_tokens]
    assert names == ["clip_cov", "kl_cov", "high_entropy"]


def test_only_the_plain_policy_gradient_has_no_ratio():
    assert [name for name, case in CASES.items() if not case.loss.uses_ratio] == ["reinforce"]


def test_every_policy_loss_has_a_case():
    assert set(concrete_objectives(PolicyLoss)) == {type(case.loss) for case in CASES.values()}
