"""Properties of all advantage estimators."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlhf.extras.algorithms.advantages_by_source import AdvantagesBySource
from lightning_rlhf.extras.algorithms.group_advantages import (
    GDPO,
    GPG,
    OPO,
    GRPOPassK,
    MaxRL,
    ReinforcePlusPlusBaseline,
)
from lightning_rlhf.extras.algorithms.teacher_advantages import TeacherLogRatio
from lightning_rlhf.extras.algorithms.token_baselines import OptimalTokenBaseline, ToolOptimalTokenBaseline
from lightning_rlhf.objectives.advantages import GAE
from lightning_rlhf.objectives.group_advantages import GRPO, RLOO
from lightning_rlhf.objectives.return_advantages import ReinforcePlusPlus, ReMax
from tests.helpers import assert_close, masks, pad_columns, properties, seeds
from tests.objectives.advantage_inputs import TOKEN_FIELDS, batches, padded, random_inputs, rows_of

ESTIMATORS = [
    GAE(0.9, 0.8, bootstrap_truncated=True),
    GAE(0.9, 0.8, critic_lambda=1.0, length_alpha=0.5),
    GRPO(),
    GRPO(normalize_std=False),
    GRPOPassK(),
    MaxRL(),
    RLOO(),
    OPO(),
    GPG(),
    ReinforcePlusPlusBaseline(),
    GDPO(("exact", "style"), (1.0, 0.5)),
    ReinforcePlusPlus(0.9),
    ReMax(),
    OptimalTokenBaseline(),
    OptimalTokenBaseline(handle_zero_tail=False),
    ToolOptimalTokenBaseline(),
    TeacherLogRatio(),
    TeacherLogRatio(GRPO(), reward_coef=0.5),
    AdvantagesBySource({"a": RLOO(), "b": GRPO()}, {"a": 0, "b": 1}),
]
CLOSE = {"rtol": 1e-9, "atol": 1e-10}

few = settings(properties, max_examples=10)  # for each of so many estimators
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)


@every_estimator
def test_results_are_finite_and_0_outside_the_mask(estimator):
    @few
    @given(batches())
    def check(inputs):  # which are NaN and infinite outside the mask
        for values in estimator(inputs):
            assert values.shape == inputs.mask.shape
            assert values.isfinite().all()
            assert (values[~inputs.mask] == 0).all()

    check()


@every_estimator
def test_padding_changes_nothing(estimator):
    @few
    @given(batches(), st.integers(1, 3))
    def check(inputs, columns):
        for ours, expected in zip(estimator(padded(inputs, columns)), estimator(inputs), strict=True):
            assert_close(ours, pad_columns(expected, columns), **CLOSE)

    check()


@every_estimator
def test_permuting_rows_and_renaming_groups_changes_nothing(estimator):
    @few
    @given(batches(), seeds)
    def check(inputs, seed):
        order = torch.randperm(len(inputs.mask), generator=torch.Generator().manual_seed(seed))
        moved = rows_of(inputs, order)
        moved = dataclasses.replace(moved, group=100 - 7 * moved.group)
        for ours, expected in zip(estimator(moved), estimator(inputs), strict=True):
            assert_close(ours, expected[order], **CLOSE)

    check()


@every_estimator
def test_response_without_tokens_changes_nothing_for_others(estimator):
    @few
    @given(batches(min_rows=2))
    def check(inputs):
        mask = inputs.mask.clone()
        mask[0] = False
        inputs = dataclasses.replace(inputs, mask=mask)
        for ours, expected in zip(estimator(inputs), estimator(rows_of(inputs, slice(1, None))), strict=True):
            assert_close(ours[1:], expected, **CLOSE)
            assert (ours[0] == 0).all()

    check()


@pytest.mark.parametrize(
    "estimator", [one for one in ESTIMATORS if type(one) is not OptimalTokenBaseline], ids=str
)  # which compares columns
def test_environment_tokens_neither_count_nor_decay(estimator):
    @few
    @given(batches())
    def check(inputs):
        order = (~inputs.mask).long().argsort(dim=1, stable=True)
        tensors = {name: getattr(inputs, name).gather(1, order) for name in TOKEN_FIELDS}
        compact = dataclasses.replace(inputs, mask=inputs.mask.gather(1, order), **tensors)
        for ours, expected in zip(estimator(inputs), estimator(compact), strict=True):
            assert_close(ours.gather(1, order), expected, **CLOSE)

    check()


@every_estimator
def test_inputs_are_not_modified(estimator):
    mask = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
    inputs, again = random_inputs(mask, [1, 1, 2], seed=3), random_inputs(mask, [1, 1, 2], seed=3)
    estimator(inputs)
    for name, value in vars(again).items():
        for ours, expected in zip(
            *(v.values() if isinstance(v, dict) else [v] for v in (getattr(inputs, name), value)), strict=True
        ):
            assert ours.equal(expected) or torch.equal(ours.isnan(), expected.isnan())


@every_estimator
def test_float32_gives_float32_close_to_float64(estimator):
    @few
    @given(masks(min_rows=3), seeds)
    def check(mask, seed):
        mask[:, 0] = True
        inputs = random_inputs(mask, [index % 2 for index in range(len(mask))], seed)
        tensors = {name: getattr(inputs, name).float() for name in (*TOKEN_FIELDS, "final_values", "greedy_reward")}
        rewards = {name: values.float() for name, values in inputs.rewards.items()}
        for ours, expected in zip(
            estimator(dataclasses.replace(inputs, **tensors, rewards=rewards)), estimator(inputs), strict=True
        ):
            assert ours.dtype == torch.float32
            assert_close(ours, expected, rtol=1e-3, atol=1e-4)

    check()


@every_estimator
def test_empty_batch_gives_an_empty_result(estimator):
    inputs = random_inputs(torch.zeros(0, 2, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), seed=1)
    for values in estimator(inputs):
        assert values.shape == (0, 2)


@every_estimator
def test_hyper_parameters_are_immutable(estimator):
    assert dataclasses.is_dataclass(estimator)
    assert hash(estimator) == hash(dataclasses.replace(estimator))
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator.anything = 1
