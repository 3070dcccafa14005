"""The environments of docs/environments.md can be trained with the documented configuration."""

import csv
import json
import re
import string
from pathlib import Path

import pytest
import yaml

PAGE = (Path(__file__).resolve().parents[2] / "docs/environments.md").read_text()
FILES = {block.split()[1]: block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
GUESS, TOOLS, STATEFUL_TOOLS, AGENT = (
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
)
BALANCES = {"balances": {"a": 5, "b": 0}, "wanted": {"a": 3, "b": 2}}
ROWS = [{"prompt": [{"role": "user", "content": f"{a}+{a}="}], "answer": str(2 * a), **BALANCES} for a in range(1, 9)]


@pytest.fixture
def metrics(fit, config):
    """Train two steps with the given arguments of a RolloutLoop and return the metrics of the last step."""

    def metrics(arguments):
        for name, block in FILES.items():
            Path(name).write_text(block)
        Path("train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
        config["data"]["init_args"] |= {"train": "train.jsonl", "max_tokens": 64}
        tokenizer = config["data"]["init_args"]["tokenizer"]["init_args"]
        tokenizer |= {"characters": string.printable, "chat": True}
        architecture = config["model"]["init_args"]["actor"]["init_args"]["architecture"]
        architecture |= {"vocab_size": len(string.printable) + 4, "max_position_embeddings": 128}
        loop = config["trainer"]["callbacks"][0]["init_args"]
        loop |= {"group_size": 1, "max_response_tokens": 48, **arguments}
        result = fit(config)
        assert result.code == 0, result.err
        return list(csv.DictReader(Path("runs/tiny/metrics.csv").read_text().splitlines()))[-1]

    return metrics


@pytest.mark.slow
def test_documented_environment(metrics):
    (loop,) = GUESS["trainer"]["callbacks"]
    arguments = loop["init_args"]
    assert arguments.pop("group_size") == 8
    assert arguments.pop("max_response_tokens") == 256
    assert 1 <= float(metrics({"rewards": [], **arguments})["env/turns"]) <= 5


@pytest.mark.slow
def test_documented_tool(metrics):
    last = metrics(TOOLS)
    assert 1 <= float(last["env/turns"]) <= 4
    assert "env/tool_calls" in last


@pytest.mark.slow
def test_documented_stateful_tools(metrics):
    last = metrics(STATEFUL_TOOLS)
    assert 1 <= float(last["env/turns"]) <= 6
    assert "env/tool_calls" in last


@pytest.mark.slow
def test_documented_agent(metrics):
    pytest.importorskip("openai")
    last = metrics({"rewards": [], **AGENT})
    assert float(last["env/turns"]) == 1
    assert float(last["env/stop_fault"]) == 0
