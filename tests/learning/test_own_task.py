"""README's section on a custom task: its commands in their order, with vLLM."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import figures

ROOT = Path(__file__).parents[2]
SECTION = re.search(r"^## Your own task\n(.*?)^## ", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]
COMMANDS = re.search(r"```bash\n(.*?)```", SECTION, re.DOTALL)[1].splitlines()
OURS = [sys.executable, "-m", "lightning_rlhf"]
pytestmark = [pytest.mark.slow, pytest.mark.learning, pytest.mark.vllm, pytest.mark.timeout(1200)]


def started(command, directory, *further):
    words = command.split()
    assert words[0] == ".venv/bin/lightning-rlhf"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([*OURS, *words[1:], *further], cwd=directory, env=environment, **pipes)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The directory in which all commands except the last ran, and the output of each."""
    pytest.importorskip("vllm")
    directory = tmp_path_factory.mktemp("own_task")
    (directory / "examples").symlink_to(ROOT / "examples")
    printed = {}
    for command in COMMANDS[:-1]:
        process = started(command, directory)
        printed[command.split(maxsplit=1)[1]], _ = process.communicate()
        assert process.returncode == 0, printed
    return directory, printed


def test_files_equal_those_in_the_section():
    row = re.search(r"`(\{.*?\})`", SECTION)[1]
    rows = (ROOT / "examples/own_task/train.jsonl").read_text().splitlines()
    assert row in rows
    assert len(rows) == 1500
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    task = (ROOT / "examples/own_task/reward.py").read_text()
    shown, used = (re.search(r"^def right\(.*\):", text, re.MULTILINE)[0] for text in (program, task))
    assert shown == used
    shown, used = (re.search(r"^    return .*$", text, re.MULTILINE)[0] for text in (program, task))
    assert shown == used.replace(", strict=True", "")  # the line of the README is shorter


def test_commands_print_no_warnings(followed):
    assert len(followed[1]) == 5
    for text in followed[1].values():
        assert "warning" not in text.lower(), text


def test_reward_improves_the_policy(followed):
    directory, _ = followed
    metrics = [
        json.loads((directory / f"runs/own_task/{run}/export/metrics.json").read_text()) for run in ("sft", "grpo")
    ]
    figures.record("after", metrics[1]["val/fraction_correct_sampled"])
    assert metrics[0]["val/loss"] < 0.2
    assert metrics[1]["val/fraction_correct_sampled"] > 0.85  # from 0.72
    table = next(text for command, text in followed[1].items() if command.startswith("evaluate"))
    share = float(re.search(r"right\s+│\s+256\s+│\s+1024\s+│\s+([\d.]+)", table)[1])
    assert share > 0.85


def test_model_is_served(followed):
    directory, _ = followed
    process = started(COMMANDS[-1], directory, "--port", "0")
    try:
        shown = ""
        for line in process.stdout:
            shown += line
            if "curl" in line:
                break
        url, key = re.search(r"curl (http://[\d.]+:\d+)", shown)[1], re.search(r"export KEY=(\S+)", shown)[1]
        name = re.search(r'"model": "([^"]+)"', shown)[1]  # that of the run
        requested = {"model": name, "prompt": "sort ceiolhgfj:", "max_tokens": 16, "temperature": 0}
        headers = {"Authorization": f"Bearer {key}"}
        answer = (
            httpx.post(f"{url}/v1/completions", json=requested, headers=headers, timeout=120).raise_for_status().json()
        )
        assert sorted(answer["choices"][0]["text"]) == list(answer["choices"][0]["text"])
        assert httpx.post(f"{url}/v1/completions", json=requested, timeout=120).status_code == 401
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
