"""Drawn numbers: small vision-language models learn to read them from wrong demonstrations, then from a reward."""

import csv
import subprocess
import sys

import pytest

from tests.learning.test_algorithms import ROOT, fit

pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("architecture", "engine"), [("idefics3", "VLLM"), ("qwen2_5_vl", "Transformers")])
def test_sampled_readings_become_right(tmp_path, architecture, engine):
    """The bounds are below the worse of two seeds, which are in configs/README.md."""
    script = ROOT / "examples/images/make_model.py"
    made = [sys.executable, script, architecture, tmp_path / "runs/images/model"]
    subprocess.run(made, check=True, capture_output=True)
    fit(tmp_path, "images/sft")
    printed = fit(tmp_path, "images/grpo")
    assert f"Rollouts by {engine}Engine" in printed
    with open(tmp_path / "runs/images/grpo/metrics.csv", newline="") as file:
        before, after = [row for row in csv.DictReader(file) if row["val/fraction_correct_sampled"]]
    assert float(before["val/fraction_correct_sampled"]) <= 0.6
    assert float(after["val/fraction_correct_sampled"]) >= 0.8
    assert float(after["val/fraction_correct_greedy"]) >= 0.83
