"""Metrics as torchmetrics objects: their values over batches and ranks, and in a module of the user."""

import contextlib
import io
import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection

from lightning_rlhf.functional.diagnostics import calibration_bins, calibration_error
from lightning_rlhf.functional.samples import best_at_k, majority_at_k, pass_at_k, wilson_interval, worst_at_k
from lightning_rlhf.metrics import (
    BestAtK,
    MajorityAtK,
    PairAccuracy,
    PairCalibrationError,
    PassAtK,
    WorstAtK,
    over,
)
from tests.helpers import assert_close, float64, normal, over_ranks, properties, seeds
from tests.test_readme import ROOT

OF_REWARDS = {BestAtK: best_at_k, WorstAtK: worst_at_k}


def test_values_for_a_case_worked_by_hand():
    rewards = float64([[0, 1, 1, 0], [0, 0, 0, 1]])
    # of the 6 draws of 2 from the first prompt 1 has no correct sample, of those from the second 3: (5/6 + 3/6) / 2
    passed, best, worst = PassAtK(2), BestAtK(2), WorstAtK(2)
    passed.update(rewards == 1)
    best.update(rewards)
    worst.update(rewards)
    assert_close(passed.compute(), 2 / 3)
    assert_close(best.compute(), 2 / 3)
    # both samples are correct in 1 of 6 draws from the first prompt, in none from the second
    assert_close(worst.compute(), 1 / 12)
    majority = MajorityAtK(3)
    majority.update([["a", "b", "b", "c"], ["x", "x", "x", "y"]], float64([[0, 1, 1, 0], [0, 0, 0, 1]]))
    # b wins the draws abb and bbc, and one third of each of abc and abc (two ways): (1 + 1 + 1/3 + 1/3) / 4;  x always
    assert_close(majority.compute(), (8 / 12) / 2)


@properties
@given(seeds)
def test_mean_over_prompts_equals_the_function_for_any_batches(seed):
    rewards = normal(7, 5, seed=seed)
    answers = [[round(reward) for reward in row] for row in rewards.tolist()]
    for k in (1, 3, 5):
        for kind, function in OF_REWARDS.items():
            metric = kind(k)
            for part in rewards.split(3):
                metric.update(part)
            assert_close(metric.compute(), sum(function(row, k) for row in rewards.tolist()) / 7)
        passed, majority = PassAtK(k), MajorityAtK(k)
        for start in (0, 3, 6):
            passed.update(rewards[start : start + 3] > 0)
            majority.update(answers[start : start + 3], rewards[start : start + 3])
        assert_close(passed.compute(), sum(pass_at_k(5, int((row > 0).sum()), k) for row in rewards) / 7)
        rows = zip(answers, rewards.tolist(), strict=True)
        assert_close(majority.compute(), sum(majority_at_k(instance, row, k) for instance, row in rows) / 7)


def test_prompt_with_a_missing_reward_is_not_counted():
    rewards = float64([[1, math.nan, 0], [0, 2, 1]])
    for metric, expected in ((BestAtK(2), (2 + 2 + 1) / 3), (WorstAtK(2), (0 + 0 + 1) / 3)):
        metric.update(rewards)
        assert_close(metric.compute(), expected)
    majority = MajorityAtK(1)
    majority.update([["a", "a", "a"], ["a", "b", "c"]], rewards)
    assert_close(majority.compute(), 1)


@pytest.mark.parametrize("kind", [PassAtK, BestAtK, WorstAtK])
def test_mean_without_prompts_is_nan(kind):
    metric = kind(2)
    metric.update(torch.zeros(0, 4))
    assert math.isnan(metric.compute())


def test_pair_metrics_for_a_case_worked_by_hand():
    accuracy, calibration = PairAccuracy(), PairCalibrationError()
    difference = float64([math.log(p / (1 - p)) for p in (0.61, 0.36, 0.92)])
    for metric in (accuracy, calibration):
        metric.update(difference[:1])
        metric.update(difference[1:])
    low, high = wilson_interval(2, 3)
    assert accuracy.compute() == {"pairs": 3, "accuracy": 2 / 3, "low": low, "high": high}
    assert_close(calibration.compute(), (0.25 + 0.08) / 3)
    tied = PairAccuracy()
    tied.update(torch.zeros(4))
    assert tied.compute()["accuracy"] == 0
    empty = PairAccuracy()
    empty.update(torch.zeros(0))
    assert empty.compute()["pairs"] == 0
    assert math.isnan(empty.compute()["accuracy"])


def test_number_of_bins_equals_that_of_the_function():
    difference = 2 * normal(40, seed=3)
    metric = PairCalibrationError(bins=4)
    metric.update(difference)
    assert_close(metric.compute(), calibration_error(calibration_bins(difference, 4)))
    assert metric.compute() != calibration_error(calibration_bins(difference))


def test_reset_clears_the_state_and_forward_returns_the_value_of_one_batch():
    rewards = normal(6, 4, seed=5)
    metric = BestAtK(2)
    assert_close(metric(rewards[:2]), sum(best_at_k(row, 2) for row in rewards[:2].tolist()) / 2)
    metric(rewards[2:])
    assert_close(metric.compute(), sum(best_at_k(row, 2) for row in rewards.tolist()) / 6)
    metric.reset()
    metric.update(rewards[5:])
    assert_close(metric.compute(), best_at_k(rewards[5].tolist(), 2))


def test_every_row_counts_once_over_ranks_even_with_an_empty_rank():
    rewards, difference = normal(5, 4, seed=1), normal(5, seed=2)
    shares = ([0, 1, 2, 3, 4], [])

    def rank(rows, ranks):
        instance = over(ranks)
        best, accuracy, calibration = BestAtK(2, **instance), PairAccuracy(**instance), PairCalibrationError(**instance)
        best.update(rewards[rows])
        for metric in (accuracy, calibration):
            metric.update(difference[rows])
        return best.compute(), accuracy.compute(), calibration.compute()

    for best, accuracy, calibration in over_ranks(*(partial(rank, rows) for rows in shares)):
        assert_close(best, sum(best_at_k(row, 2) for row in rewards.tolist()) / 5)
        assert accuracy["pairs"] == 5
        assert accuracy["accuracy"] == float((difference > 0).double().mean())
        assert_close(calibration, calibration_error(calibration_bins(difference)))


class Foreign(LightningModule):
    """A user's module that logs these objects like other torchmetrics."""

    def __init__(self):
        super().__init__()
        self.at_k = MetricCollection({"best": BestAtK(2), "worst": WorstAtK(2)})

    def validation_step(self, batch, batch_idx):
        self.at_k.update(batch)
        self.log_dict(self.at_k, on_epoch=True)


def test_lightning_logs_the_objects_like_other_metrics(tmp_path):
    rewards = normal(6, 4, seed=7)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    (logged,) = trainer.validate(Foreign(), DataLoader(rewards, batch_size=4), verbose=False)
    assert_close(logged["best"], sum(best_at_k(row, 2) for row in rewards.tolist()) / 6, rtol=1e-6)
    assert_close(logged["worst"], sum(worst_at_k(row, 2) for row in rewards.tolist()) / 6, rtol=1e-6)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: PassAtK(0), "PassAtK needs k >= 1, got k=0"),
        (lambda: PairCalibrationError(bins=0), "PairCalibrationError needs bins >= 1, got bins=0"),
        (lambda: BestAtK(3).update(torch.zeros(1, 2)), "best@k needs 1 <= k <= n, got n=2, k=3"),
        (lambda: PassAtK(3).update(torch.zeros(1, 2)), "pass@k needs 1 <= k <= n"),
        (
            lambda: MajorityAtK(1).update([["a"]], torch.zeros(2, 1)),
            "MajorityAtK needs answers and rewards of the same prompts, got 1 and 2",
        ),
    ],
)
def test_wrong_arguments_are_reported_by_name(made, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        made()


def test_example_of_the_page_prints_the_documented_values():
    (block,) = re.findall("```python\n(.*?)```", (ROOT / "docs/reference/metrics.md").read_text(), re.DOTALL)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(compile(block, "metrics.md", "exec"), {})
    assert written.getvalue().splitlines() == re.findall(r"(?:^|  )# (.*\d.*)$", block, re.MULTILINE)[1:]
