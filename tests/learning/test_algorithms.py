"""Every algorithm solves the addition task from the same supervised start, with real vLLM, as its YAML says."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.vllm, pytest.mark.timeout(900)]

# Least share of right answers on 512 held-out problems, sampled and greedy, after the last step: 0.04 and 0.03 below
# the worse of two seeds, which are in configs/README.md. Another processor rounds otherwise, so its samples are others.
BOUNDS = {
    "bypass": (0.91, 0.95),
    "cispo": (0.92, 0.96),
    "clip_cov": (0.91, 0.95),
    "dapo": (0.93, 0.96),
    "dppo": (0.91, 0.95),
    "dr_grpo": (0.91, 0.95),
    "dro": (0.90, 0.94),
    "gdpo": (0.91, 0.95),
    "gmpo": (0.91, 0.94),
    "gpg": (0.89, 0.94),
    "grpo": (0.90, 0.95),
    "grpo_passk": (0.92, 0.95),
    "gspo": (0.90, 0.95),
    "kl_cov": (0.91, 0.94),
    "luspo": (0.90, 0.94),
    "opo": (0.89, 0.95),
    "optimal_token_baseline": (0.89, 0.92),
    "pf_ppo": (0.91, 0.95),
    "reinforce_plus_plus": (0.90, 0.95),
    "reinforce_plus_plus_baseline": (0.91, 0.95),
    "remax": (0.91, 0.95),
    "rloo": (0.90, 0.95),
    "sapo": (0.92, 0.96),
    "tis": (0.91, 0.95),
    "vespo": (0.91, 0.95),
}


def fit(name, directory):
    """What a run printed."""
    command = [sys.executable, "-m", "lightning_rlhf", "fit", "--config", str(ROOT / f"configs/{name}.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A directory with the supervised model in it."""
    pytest.importorskip("vllm")
    directory = tmp_path_factory.mktemp("algorithms")
    fit("quickstart/sft", directory)
    return directory


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_the_task_is_solved(start, name):
    printed = fit(f"algorithms/{name}", start)
    assert "warning" not in printed.lower()
    assert "Rollouts by VLLMEngine" in printed
    with open(start / f"runs/algorithms/{name}/metrics.csv", newline="") as file:
        before, after = [row for row in csv.DictReader(file) if row["val/sampled"]]
    assert float(before["val/sampled"]) <= 0.60
    assert float(before["val/greedy"]) <= 0.45
    sampled, greedy = BOUNDS[name]
    assert float(after["val/sampled"]) >= sampled
    assert float(after["val/greedy"]) >= greedy
