"""Examples with several turns run as documented: a tool, feedback, two lookups; with vLLM."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.vllm, pytest.mark.timeout(1800)]


def validations(directory, task, metric):
    """Return the (sampled, greedy) values of the first and the last validation."""
    with open(directory / f"runs/environments/{task}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[f"val/{metric}_sampled"]]
    return [tuple(float(row[f"val/{metric}_{kind}"]) for kind in ("sampled", "greedy")) for row in (rows[0], rows[-1])]


@pytest.mark.parametrize(
    ("task", "metric", "gain", "least"),
    [("calculator", "right", 0.3, 0.8), ("lookup", "environment", 0.3, 0.9), ("guessing", "found", 0.2, 0.5)],
)
def test_policy_learns_from_several_turns(tmp_path, task, metric, gain, least):
    pytest.importorskip("vllm")
    for name in (f"{task}_sft", task):
        command = [
            sys.executable,
            "-m",
            "lightning_rlhf",
            "fit",
            "--config",
            ROOT / f"configs/environments/{name}.yaml",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (before, _), (after, _) = validations(tmp_path, task, metric)
    assert after >= before + gain
    assert after >= least
