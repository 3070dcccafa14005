import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_rlhf.objectives.value_losses import ClippedValueLoss
from tests.helpers import assert_close, float64, golden, normal, properties, seeds

clip_ranges = st.sampled_from([0.05, 0.5, 2.0])


def test_loss_of_a_case_worked_by_hand():
    # old 1, clip 0.5: the value counts as at most 1.5 and at least 0.5
    #   V   R   (V - R)^2   (clip - R)^2
    #   3   4   1           6.25           the step up is bounded
    #   3   0   9           2.25           the true error is the larger one
    #   1.25 2  0.5625      0.5625         inside the range
    #  -1  -2   1           6.25           the step down is bounded
    values, old, returns = float64([3, 3, 1.25, -1]), torch.ones(4), float64([4, 0, 2, -2])
    loss, diagnostics = ClippedValueLoss(0.5)(values, old, returns)
    assert_close(loss, [3.125, 4.5, 0.28125, 3.125])
    assert_close(diagnostics["clip_fraction"], [1, 0, 0, 1])


def test_unclipped_loss_is_half_the_squared_error():
    values = float64([3, 1]).requires_grad_()
    loss, diagnostics = ClippedValueLoss(None)(values, torch.zeros(2), float64([1, 4]))
    loss.sum().backward()
    assert_close(loss, [2, 4.5])
    assert_close(values.grad, [2, -3])
    assert_close(diagnostics["clip_fraction"], [0, 0])


def test_default_range_is_one_half():
    assert ClippedValueLoss() == ClippedValueLoss(0.5)


@properties
@given(clip_ranges, seeds)
def test_loss_follows_the_formula(clip_range, seed):
    values, old, returns = (normal(3, 4, seed=seed + i) for i in range(3))
    loss, diagnostics = ClippedValueLoss(clip_range)(values, old, returns)
    rows = (tensor.flatten().tolist() for tensor in (values, old, returns, loss, diagnostics["clip_fraction"]))
    for value, before, target, ours, clipped in zip(*rows, strict=True):
        bounded = min(max(value, before - clip_range), before + clip_range)
        errors = (value - target) ** 2, (bounded - target) ** 2
        assert_close(ours, max(errors) / 2)
        assert clipped == (errors[1] > errors[0])


@pytest.mark.parametrize("case", [0, 1])
def test_loss_gradient_and_clip_fraction_equal_those_of_verl(case):
    recorded = golden("verl")
    inputs, expected = recorded["inputs"], recorded["outputs"]["value_loss"][case]
    mask = float64(inputs["mask"]).bool()
    values = float64(inputs["values"]).requires_grad_()
    objective = ClippedValueLoss(expected["clip_range"])
    loss, diagnostics = objective(values, float64(inputs["old_values"]), float64(inputs["returns"]))
    assert_close(loss, expected["token_losses"])
    loss[mask].mean().backward()
    assert_close(values.grad, expected["gradient_of_mean"])
    assert_close(diagnostics["clip_fraction"][mask].mean(), expected["clip_fraction"])
    assert expected["clip_fraction"] > 0


@properties
@given(clip_ranges, seeds)
def test_gradient_is_the_error_unless_the_clip_binds(clip_range, seed):
    values, old, returns = (normal(3, 4, seed=seed + i) for i in range(3))
    values.requires_grad_()
    loss, diagnostics = ClippedValueLoss(clip_range)(values, old, returns)
    loss.sum().backward()
    assert_close(values.grad, torch.where(diagnostics["clip_fraction"].bool(), 0.0, values.detach() - returns))
    assert not diagnostics["clip_fraction"].requires_grad


@properties
@given(clip_ranges, seeds)
def test_clipping_never_lowers_the_loss(clip_range, seed):
    values, old, returns = (normal(3, 4, seed=seed + i) for i in range(3))
    plain, _ = ClippedValueLoss(None)(values, old, returns)
    assert (ClippedValueLoss(clip_range)(values, old, returns)[0] >= plain).all()


def test_perfect_critic_has_loss_and_gradient_0():
    values = normal(2, 3, seed=0).requires_grad_()
    loss, _ = ClippedValueLoss()(values, values.detach(), values.detach())
    loss.sum().backward()
    assert_close(loss, torch.zeros(2, 3))
    assert_close(values.grad, torch.zeros(2, 3))


def test_rounding_does_not_count_as_clipping():
    # old + (new - old) differs from new in a fifth of these, which close targets make visible
    old, returns = normal(1000, seed=0, dtype=torch.float32), normal(1000, seed=1, dtype=torch.float32)
    values = returns + 0.01 * normal(1000, seed=2, dtype=torch.float32)
    loss, diagnostics = ClippedValueLoss(clip_range=100.0)(values, old, returns)
    assert diagnostics["clip_fraction"].sum() == 0
    assert torch.equal(loss, (values - returns) ** 2 / 2)


@properties
@given(st.sampled_from([None, 0.5]), seeds)
def test_tokens_are_independent(clip_range, seed):
    tensors = [normal(3, 4, seed=seed + i) for i in range(3)]
    whole = ClippedValueLoss(clip_range)(*tensors)[0]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    permuted = ClippedValueLoss(clip_range)(*(tensor.flatten()[order] for tensor in tensors))[0]
    assert_close(permuted, whole.flatten()[order])
    tensors[0][0, 0] = torch.nan
    assert_close(ClippedValueLoss(clip_range)(*tensors)[0].flatten()[1:], whole.flatten()[1:])


@pytest.mark.parametrize("clip_range", [0.0, -0.5])
def test_non_positive_range_is_rejected(clip_range):
    with pytest.raises(ValueError, match=rf"^value clip_range must be positive or null, got {clip_range}$"):
        ClippedValueLoss(clip_range)
