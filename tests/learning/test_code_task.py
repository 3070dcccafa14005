"""The programming task is learned from hidden tests in the sandbox, with vLLM, as configured in its YAML."""

import csv
import shutil

import pytest

from tests.learning.test_algorithms import fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.learning,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


def test_most_programs_pass_the_hidden_tests(tmp_path):
    pytest.importorskip("vllm")
    fit(tmp_path, "code/sft")
    printed = fit(tmp_path, "code/grpo")
    assert "warning" not in printed.lower()
    with open(tmp_path / "runs/code/grpo/metrics.csv", newline="") as file:
        before, after = [row for row in csv.DictReader(file) if row["val/fraction_correct_sampled"]]
    assert float(before["val/fraction_correct_sampled"]) <= 0.60
    assert float(before["val/fraction_correct_greedy"]) <= 0.45
    assert float(after["val/fraction_correct_sampled"]) >= SAMPLED
    assert float(after["val/fraction_correct_greedy"]) >= GREEDY


# Well below the worse of two seeds, which are in configs/README.md: another processor rounds otherwise.
SAMPLED, GREEDY = 0.70, 0.85
