"""docs/tutorial.md: its files and commands are run in order; the first run fails, and the second one learns."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"```(\w+)(?: title=\"(.+?)\")?\n(.*?)```", PAGE, re.DOTALL)
RATE = next(block.strip() for language, title, block in BLOCKS if language == "yaml" and not title)


def run_commands(block, folder):
    """Run the commands of a block, and return the folder in which the next ones run."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for line in block.splitlines():
        program, *arguments = line.split()
        if program == "cd":
            folder = folder / arguments[0]
            continue
        start = [sys.executable, "-m", "lightning_rlhf"] if program == "lightning-rlhf" else [sys.executable]
        done = subprocess.run([*start, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return folder


def column(run, name):
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    return [float(row[name]) for row in rows if row.get(name)]


def correct_answers(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    scores = [text.endswith(f":{row['answer']}") for row in rows for text in row["responses"]]
    return sum(scores) / len(scores)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial(tmp_path):
    folder = tmp_path
    for language, title, block in BLOCKS:
        if title:
            (folder / title).write_text(block)
        elif language == "yaml":
            config = folder / "run.yaml"
            text, count = re.subn(r"optimizer: \{.*\}", RATE, config.read_text())
            assert count == 1
            config.write_text(text)
        elif language == "bash":
            folder = run_commands(block, folder)
    first, second = column(folder / "runs/first", "reward/mean"), column(folder / "runs/second", "reward/mean")
    assert first[0] > 0.3
    assert max(first[-3:]) < 0.1
    assert "damaged the policy" in (folder / "runs/first/report.html").read_text()
    assert sum(second[-5:]) / 5 > 0.9
    assert len(second) == 30
    greedy = column(folder / "runs/second", "val/fraction_correct_greedy")
    assert greedy[0] < 0.6
    assert greedy[-1] > 0.95
    assert correct_answers(folder / "after.jsonl") > correct_answers(folder / "before.jsonl") + 0.2
    assert (folder / "comparison.html").is_file()
