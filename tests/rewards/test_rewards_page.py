"""docs/rewards.md: its code runs, its configurations are valid, its tables are complete."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_rlhf.calls import guard
from lightning_rlhf.rewards import executor, workers
from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import (
    CALL_ARGUMENTS,
    GENERATED_COLUMNS,
    OPENRLHF,
    VERL,
    VERL_BATCH,
    RewardFunction,
)

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text("\n".join(blocks("python")))


def test_documented_function_logs_a_metric(folder):
    reward = RewardFunction("my_rewards.py:close")
    columns = {"completions": ["42", "it is 42", "7"], "answer": ["42"] * 3, "prompts": [""] * 3}
    with executor.RewardExecutor([reward]) as running:
        scored = running.score(columns)
    assert scored.rewards["close"].tolist() == [1.0, 0.5, 0.0]
    total, count = scored.metrics["reward_close/exact"]
    assert total / count == pytest.approx(1 / 3)


def rewards_of(text):
    result = yaml.safe_load(text)
    if "rewards" not in result:
        result = result["trainer"]["callbacks"][0]["init_args"]
    parser = ArgumentParser()
    parser.add_argument("--rewards", type=list[RewardFunction])
    return parser.instantiate(parser.parse_object({"rewards": result["rewards"]})).rewards


def test_documented_function_computes_rewards(folder):
    reward = RewardFunction("my_rewards.py:brief_and_right")
    values = compute_reward(reward, completions=["42", "7"], answer=["42", "42"], prompts=["", ""]).tolist()
    assert values == pytest.approx([0.98, -0.01])


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_configuration_creates_reward_functions(folder, text):
    made = rewards_of(text)
    for reward in made:
        reward.check(["answer"])
    assert made[0].label == "brief_and_right"


def test_tables_name_all_arguments_and_options():
    for name in (*GENERATED_COLUMNS, *CALL_ARGUMENTS):
        assert f"`{name}" in PAGE
    for convention in (VERL, VERL_BATCH, OPENRLHF):
        assert f"`{convention.marker}`" in PAGE
        assert all(f"{theirs}=" in PAGE for theirs in convention.columns)
    options = {field.name: field.default for field in fields(RewardFunction)}
    assert f"max_error_rate: {options['max_error_rate']}" in PAGE
    assert "`on_error: raise` | a failure ends the run; the default" in PAGE
    assert options["on_error"] == "raise"
    assert f"up to {workers._MAX_PROCESSES} processes" in PAGE
    assert f"up to {executor._THREADS} threads" in PAGE
    assert f"{guard._MAX_OUTPUT:,} characters" in PAGE
