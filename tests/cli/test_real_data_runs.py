"""The consecutive runs on HH-RLHF and GSM8K at a small size, on a few made-up rows in the format of the data."""

import csv
import json
from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 300}


def talk(i):
    start = f"\n\nHuman: Talk about number {i}.\n\nAssistant: Which one?\n\nHuman: Number {i}.\n\nAssistant:"
    return {"chosen": f"{start} It follows {i - 1}.", "rejected": f"{start} No{'!' * i}"}


def question(i):
    return {"question": f"Ann has {i} apples and buys 2. How many?", "answer": f"{i}+2=<<{i}+2={i + 2}>>\n#### {i + 2}"}


@pytest.fixture
def run(fit):
    """Write data to the working directory; returns a function that runs a small version of a configuration."""
    for name, make in {"hh_rlhf": talk, "gsm8k": question}.items():
        Path("data", name).mkdir(parents=True)
        too_long = {key: f"{value} {'x ' * 2000}" for key, value in make(1).items()}
        for split, rows in (("train", [too_long, *map(make, range(1, 13))]), ("test", map(make, range(20, 26)))):
            Path("data", name, f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name):
        config = yaml.safe_load((CONFIGS / name).read_text())
        model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
        data["batch_size"] = 4
        if name.endswith("sft.yaml"):
            model["actor"]["init_args"]["architecture"].update(SMALL)
            data["tokenizer"]["init_args"]["vocab_size"] = 300
        if name.endswith("ppo.yaml"):
            model["minibatch_size"] = 4
            trainer["callbacks"][0]["init_args"] |= {
                "engine": "lightning_rlhf.rollout.transformers.TransformersEngine",
                "max_response_tokens": 6,
            }
        else:
            trainer["val_check_interval"] = 2
        trainer |= {"accelerator": "cpu", "max_steps": 2}
        result = fit(config)
        assert result.code == 0, result.err
        with open(Path(trainer["default_root_dir"]) / "metrics.csv", newline="") as table:
            rows = list(csv.DictReader(table))
        return result.out, {column: float(value) for row in rows for column, value in row.items() if value}

    return run


@pytest.mark.slow
def test_human_preferences_from_data_to_policy(run):
    out, metrics = run("hh_rlhf/sft.yaml")
    assert "train data: 13 rows read, 12 kept; dropped 1: the text longer than 256 tokens" in out
    assert metrics["val/loss"] > 0
    _, metrics = run("hh_rlhf/reward.yaml")
    assert metrics["val/pairs"] == 6
    assert metrics["val/pair_accuracy_low"] <= metrics["val/pair_accuracy"] <= metrics["val/pair_accuracy_high"]
    _, metrics = run("hh_rlhf/ppo.yaml")
    assert {"val/score_sampled", "val/score_greedy", "kl/ref"} <= set(metrics)


@pytest.mark.slow
def test_rule_based_rewards_from_data_to_policy(run):
    run("gsm8k/sft.yaml")
    out, metrics = run("gsm8k/ppo.yaml")
    assert "dropped 1: the prompt longer than 128 tokens" in out
    assert {"val/strict_sampled", "val/lenient_sampled", "reward/strict", "reward/lenient", "kl/ref"} <= set(metrics)
