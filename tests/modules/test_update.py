"""One optimizer step is exact for any micro-batches, order of rows, padding and number of ranks."""

import itertools
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_rlhf import SFTModule
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import SequenceBatch
from tests import figures
from tests.helpers import over_ranks
from tests.stand_ins import VOCABULARY, OneOfTwoRanks, TinyModel, fit

SGD = partial(torch.optim.SGD, lr=1.0)  # the step is the gradient
LENGTHS = (2, 9, 5, 5, 1, 7, 3)


def texts(lengths=LENGTHS, width=10, seed=0):
    """Return random texts with about half of their tokens marked; padding holds tokens too."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), width), generator=draw)
    lengths = torch.tensor(lengths)
    position = torch.arange(width).expand_as(ids)
    marked = torch.rand(ids.shape, generator=draw) < 0.6
    return SequenceBatch(ids, lengths, marked & (position > 0) & (position < lengths.unsqueeze(1)))


def module_with(dtype="float64", **options):
    """Return a module with initialized weights, because ranks in threads cannot share one random state for it."""
    module = SFTModule(TinyModel(dtype=dtype), optimizer=SGD, **({"max_grad_norm": None} | options))
    module.configure_model()
    return module


def step_of(module, batch, strategy="auto"):
    """Return the change of each weight in one step."""
    before = deepcopy(module.actor.state_dict())
    fit(module, [batch], strategy=strategy)
    return {name: before[name] - after for name, after in module.actor.state_dict().items()}


def gradient(batch, **options):
    """Return the change of each weight in one step of a new module."""
    return step_of(module_with(**options), batch)


def whole_batch_gradient(batch):
    """Return the gradient of the mean negative log-likelihood over all marked tokens, text by text without padding."""
    lm = TinyModel(dtype="float64").causal().lm
    total = 0
    for ids, length, marked in zip(batch.input_ids, batch.lengths, batch.loss_mask, strict=True):
        logits = lm(ids[None, :length]).logits[0, :-1]
        target, wanted = ids[1:length], marked[1:length]
        total = total - logits.log_softmax(-1).gather(1, target[:, None])[wanted].sum()
    (total / batch.loss_mask.sum()).backward()
    return {f"lm.{name}": parameter.grad for name, parameter in lm.named_parameters()}


def assert_same(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    if tolerance <= 1e-12:  # in float64
        figures.record("difference of gradients", difference)
    assert difference <= tolerance
    assert max(float(value.abs().max()) for value in theirs.values()) > 0.01  # there is something to compare


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("micro_batch_tokens", [1, 7, 12, 20, 10_000])
def test_gradient_is_that_of_the_whole_batch_for_any_token_budget(micro_batch_tokens):
    batch = texts()
    ours = gradient(batch, micro_batch_tokens=micro_batch_tokens)
    assert_same(ours, whole_batch_gradient(batch), 1e-12)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("seed", [1, 2])
def test_order_of_rows_does_not_change_the_gradient(seed):
    batch = texts()
    shuffled = batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))]
    assert_same(gradient(shuffled, micro_batch_tokens=12), gradient(batch, micro_batch_tokens=12), 1e-12)


@pytest.mark.usefixtures("exact")
def test_tokens_in_the_padding_do_not_change_the_gradient():
    batch = texts()
    position = torch.arange(15).expand(len(batch), -1)
    wide = torch.full(position.shape, VOCABULARY - 1)
    wide[:, :10] = batch.input_ids
    wide = torch.where(position < batch.lengths.unsqueeze(1), wide, VOCABULARY - 2)
    mask = torch.nn.functional.pad(batch.loss_mask, (0, 5))
    wider = SequenceBatch(wide, batch.lengths, mask)
    assert_same(gradient(wider, micro_batch_tokens=12), gradient(batch, micro_batch_tokens=12), 1e-12)


def test_token_budget_changes_the_gradient_by_rounding_only_in_float32():
    batch = texts()
    ours = gradient(batch, dtype="float32", micro_batch_tokens=12)
    assert_same(ours, gradient(batch, dtype="float32"), 1e-6)


@pytest.mark.usefixtures("exact")
def test_rows_without_a_marked_token_have_no_weight():
    batch = texts()
    silent = texts(lengths=(4, 6), seed=9)
    both = SequenceBatch(
        torch.cat([batch.input_ids, silent.input_ids]),
        torch.cat([batch.lengths, silent.lengths]),
        torch.cat([batch.loss_mask, torch.zeros_like(silent.loss_mask)]),
    )
    assert_same(gradient(both, micro_batch_tokens=6), gradient(batch), 1e-12)


def test_batch_without_marked_tokens_changes_nothing():
    batch = texts()
    silent = SequenceBatch(batch.input_ids, batch.lengths, torch.zeros_like(batch.loss_mask))
    assert all(not value.any() for value in gradient(silent).values())


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_strategy_with_the_role_interface_is_recognized():
    assert isinstance(OneOfTwoRanks(SimpleNamespace(maximum=torch.clone)), RoleStrategy)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("micro_batch_tokens", [9, 1000])
def test_two_ranks_with_uneven_tokens_step_like_one_rank_with_all_rows(micro_batch_tokens, max_grad_norm):
    batch = texts()
    shares = (0, 1, 2), (3, 4, 5, 6)
    assert len({int(batch[rows].loss_mask.sum()) for rows in shares}) == 2

    modules = [module_with(micro_batch_tokens=micro_batch_tokens, max_grad_norm=max_grad_norm) for _ in shares]

    def rank(number, ranks):
        strategy = OneOfTwoRanks(ranks)
        return step_of(modules[number], batch[shares[number]], strategy), strategy.syncs

    (first, syncs), (second, _) = over_ranks(*(partial(rank, number) for number in (0, 1)))
    alone = gradient(batch, micro_batch_tokens=1000, max_grad_norm=max_grad_norm)
    assert_same(first, second, 0.0)
    assert max(float((first[name] - alone[name]).abs().max()) for name in alone) <= 1e-12
    assert syncs == [False] * (len(syncs) - 1) + [True]  # gradients cross ranks once per step


# -- the norm ---------------------------------------------------------------------------------------------------------


def norm(gradients):
    return float(torch.stack([value.norm() for value in gradients.values()]).norm())


@pytest.mark.usefixtures("exact")
def test_gradients_are_clipped_to_the_global_norm_and_small_ones_are_not_changed():
    batch = texts()
    free = gradient(batch)
    clipped = gradient(batch, max_grad_norm=0.25)
    assert norm(clipped) == pytest.approx(0.25, rel=1e-5)
    for name, value in clipped.items():
        torch.testing.assert_close(value, free[name] * 0.25 / norm(free), rtol=1e-5, atol=1e-9)
    assert_same(gradient(batch, max_grad_norm=100.0), free, 1e-12)


def test_norm_before_clipping_is_logged():
    batch = texts()
    module = SFTModule(TinyModel(), optimizer=SGD, max_grad_norm=0.25)
    logged = fit(module, [batch]).callback_metrics["grad_norm/actor"]
    assert float(logged) == pytest.approx(norm(gradient(batch, dtype="float32")), rel=1e-4)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_gradient_raises_and_does_not_change_the_weights(poison, max_grad_norm):
    module = SFTModule(TinyModel(), optimizer=SGD, max_grad_norm=max_grad_norm)
    original = module.token_loss
    module.token_loss = lambda *arguments, **options: original(*arguments, **options) * poison
    with pytest.raises(FloatingPointError, match=r"the actor's gradient norm is (nan|inf) at step 0; its weights were"):
        fit(module, [texts()])
    for (name, after), before in zip(module.actor.named_parameters(), TinyModel().causal().parameters(), strict=True):
        assert torch.equal(after, before), name


# -- state of a module of roles -------------------------------------------------------------------------------------


def test_gradients_do_not_accumulate_from_step_to_step():
    batch = texts()
    lasting = SFTModule(TinyModel(), optimizer=partial(torch.optim.SGD, lr=0.1), max_grad_norm=None)
    fit(lasting, [batch, batch])
    assert all(parameter.grad is None for parameter in lasting.actor.parameters())


def test_global_step_and_schedule_count_batches():
    rates = []

    class Watch(SFTModule):
        def finish_step(self, metrics, bar):
            super().finish_step(metrics, bar)
            rates.append((self.trainer.global_step, metrics["lr/actor"], self.optimizers().param_groups[0]["lr"]))

    halve = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    module = Watch(TinyModel(), optimizer=SGD, lr_scheduler=halve, micro_batch_tokens=5)
    assert fit(module, itertools.repeat(texts(), 3)).global_step == 3
    # the logged rate is that of the step; the next one is already set
    assert rates == [(1, 1.0, 0.5), (2, 0.5, 0.25), (3, 0.25, 0.125)]


def test_scaled_gradients_are_rejected_before_any_model_is_loaded():
    module, scaled = SFTModule(TinyModel()), MixedPrecision("16-mixed", "cpu")
    with pytest.raises(ValueError, match=r"^precision 16-mixed scales gradients, .*: use bf16-mixed$"):
        fit(module, [texts()], plugins=[scaled])
    assert not module.built


@pytest.mark.parametrize("micro_batch_tokens", [0, -5])
def test_token_budget_must_be_positive(micro_batch_tokens):
    with pytest.raises(ValueError, match=rf"^micro_batch_tokens must be positive or null, got {micro_batch_tokens}$"):
        SFTModule(TinyModel(), micro_batch_tokens=micro_batch_tokens)


@pytest.mark.parametrize("max_grad_norm", [0.0, -1.0])
def test_gradient_norm_must_be_positive_or_null(max_grad_norm):
    with pytest.raises(ValueError, match=rf"^max_grad_norm must be positive or null, got {max_grad_norm}$"):
        SFTModule(TinyModel(), max_grad_norm=max_grad_norm)
