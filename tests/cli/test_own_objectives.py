"""Custom objectives in a user's file are configured in YAML like built-in ones, with the same error messages."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = '''
from dataclasses import dataclass

import torch

from lightning_rlhf.objectives.aggregation import TokenMean
from lightning_rlhf.objectives.base import PolicyLoss


@dataclass(frozen=True)
class Squared(PolicyLoss):
    """REINFORCE, weighted."""

    strength: float = 1.0

    def __post_init__(self):
        if self.strength <= 0:
            raise ValueError(f"strength must be positive, got {self.strength}")

    def token_losses(self, tokens):
        return -self.strength * tokens.advantages * tokens.logprobs, {"seen": torch.ones_like(tokens.logprobs)}


class Half(TokenMean):
    """Every token weighs half."""

    def weights(self, mask):
        return super().weights(mask) / 2
'''


@pytest.fixture
def configured(config, tmp_path, monkeypatch):
    """A configuration whose estimator, loss and aggregation are defined by the user."""
    (tmp_path / "my_losses.py").write_text(OWN)
    shutil.copy(ROOT / "examples/03_new_algorithm.py", tmp_path / "my_algorithms.py")
    monkeypatch.syspath_prepend(tmp_path)
    config["model"] |= {"class_path": "lightning_rlhf.RLHFModule"}
    config["model"]["init_args"] |= {
        "advantages": {"class_path": "my_algorithms.MeanBaseline", "init_args": {"scale": 2.0}},
        "policy_loss": {"class_path": "my_losses.Squared", "init_args": {"strength": 0.5}},
        "aggregation": {"class_path": "my_losses.Half"},
    }
    return config


def test_run_with_custom_objectives(configured, fit, tmp_path):
    result = fit(configured)
    assert (result.code, result.err) == (0, "")
    header, row, *_ = (tmp_path / "runs/tiny/metrics.csv").read_text().splitlines()
    metrics = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(metrics["policy/seen"]) == 1.0
    assert "kl/approx" in metrics


def test_value_rejected_by_a_custom_objective_gives_a_one_line_error(configured, fit):
    configured["model"]["init_args"]["policy_loss"]["init_args"]["strength"] = -1.0
    result = fit(configured)
    assert result.code == 2
    assert "strength must be positive, got -1.0" in result.err


def test_unknown_option_of_a_custom_objective_is_reported_with_a_suggestion(configured, fit):
    configured["model"]["init_args"]["advantages"]["init_args"] = {"scael": 1.0}
    result = fit(configured)
    assert result.code == 2
    assert "did you mean 'scale'?" in result.err
