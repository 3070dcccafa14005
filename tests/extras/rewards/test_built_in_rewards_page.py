"""docs/built_in_rewards.md: every YAML block is valid, and every reward of the table exists."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightning_rlhf.rewards.function import RewardFunction, check_rewards

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "built_in_rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
ELSEWHERE = {  # pages that show rewards of the table
    "extras.sandbox.code": "sandbox.md",
    "extras.judges.rubric_reward": "judges.md",
    "extras.judges.ranking_reward": "judges.md",
}
NAMED = re.findall(r"^\| `lightning_rlhf\.([\w.]+)\.(\w+)` \|", PAGE, re.MULTILINE)


def made(block):
    """Instantiate the rewards of a block."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=list[RewardFunction])
    return parser.instantiate(parser.parse_object({"rewards": yaml.safe_load(block)})).rewards


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block_creates_rewards_that_pass_the_checks(block):
    pytest.importorskip("math_verify")
    pytest.importorskip("tenacity")
    rewards = made(block)
    assert rewards
    assert len(rewards) == len(yaml.safe_load(block))
    check_rewards(rewards, ["ground_truth", "data_source"])


def test_every_reward_of_the_table_exists_and_has_an_example():
    assert len(NAMED) >= 16
    for module, name in NAMED:
        result = import_module(f"lightning_rlhf.{module}")
        assert callable(getattr(result, name)), name
        blocks = [(DOCS / ELSEWHERE[module]).read_text(encoding="utf-8")] if module in ELSEWHERE else BLOCKS
        assert any(f"lightning_rlhf.{module}.{name}" in block for block in blocks), name


def test_block_with_a_wrong_option_raises_an_error():
    with pytest.raises(Exception, match="timeout_ms"):
        made("- {function: {class_path: lightning_rlhf.extras.rewards.math.MathReward, init_args: {timeout_ms: 1}}}")
