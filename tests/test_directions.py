"""Directions in which metrics improve."""

import pytest

from lightning_rlhf.directions import direction_of, is_own


@pytest.mark.parametrize(
    ("direction", "metrics"),
    [
        ("min", ["val/loss", "train/loss", "loss/policy", "kl/ref", "kl/approx", "val/kl", "val/sft_loss"]),
        ("min", ["val/pair_calibration_error", "val/divergence", "mixture/a/loss", "reward_x/errors", "val/math/loss"]),
        ("max", ["reward/mean", "reward/exact", "reward/after_kl_mean", "val/exact_greedy", "val/score_sampled"]),
        ("max", ["val/fraction_correct_sampled", "val/pass@8", "val/maj@4", "val/exact_best@8", "val/pair_accuracy"]),
        ("max", ["train/score_margin", "val/policy_accuracy", "value/explained_variance", "mixture/a/reward"]),
        ("max", ["val/math/fraction_correct_greedy", "train/reward_chosen", "val/accuracy", "reward_x/accuracy"]),
        ("min", ["reward/missing_fraction", "rollout/truncated_fraction"]),
        (None, ["val/entropy", "policy/entropy", "rollout/response_tokens_mean", "own/longest", "time/step_s", "step"]),
        (None, ["reward/std", "reward/exact_std", "kl/coef", "val/exact_greedy_low", "group/equal_reward_fraction"]),
        (None, ["val/own", "env/turns", "grad_norm/actor", "lr/actor", "perf/tokens_per_s", "train/reward_rejected"]),
    ],
)
def test_metrics_have_the_direction_in_which_they_improve(direction, metrics):
    assert {metric: direction_of(metric) for metric in metrics} == dict.fromkeys(metrics, direction)


def test_only_metrics_of_this_package_have_a_direction_that_nobody_else_chooses():
    own = ["train/loss", "val/loss", "kl/ref", "reward/mean", "val/fraction_correct_greedy", "val/pair_accuracy"]
    others = ["reward/length", "val/toxicity_greedy", "env/win_loss_ratio", "env/errors_fixed", "val/own_loss"]
    assert [name for name in [*own, *others] if is_own(name)] == own
