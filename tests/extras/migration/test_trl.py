"""A configuration from options of TRL: their values, those that could not be carried over, and mistakes."""

import json
import subprocess
import sys

import pytest
import yaml

from lightning_rlhf.extras.commands import new
from lightning_rlhf.extras.migration.trl import converted, trainer_of
from lightning_rlhf.extras.schema.check import mistakes

GRPO = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "owner/rows",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "beta": 0.04,
    "epsilon_high": 0.28,
    "reward_funcs": ["right", "my.module.format"],
    "reward_weights": [1.0, 0.2],
    "use_peft": True,
    "lora_r": 32,
    "gradient_checkpointing": True,
    "report_to": ["wandb"],
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.4,
}


def parts(options, trainer="grpo", devices=1):
    config, left = converted(options, trainer, devices)
    return config["model"]["init_args"], config["data"]["init_args"], config["trainer"], left


def loop(run):
    return run["callbacks"][0]["init_args"]


def test_sizes_of_grpo_count_prompts_over_all_devices():
    model, data, run, left = parts(GRPO, devices=4)
    assert (data["batch_size"], loop(run)["group_size"], run["devices"]) == (16, 8, 4)  # 8 * 4 * 4 responses
    assert "minibatch_size" not in model  # one update of all responses
    assert left == ["max_tokens of the data is 512: TRL has no limit, prompts that are longer are named"]
    assert model["actor"]["init_args"] == {"path": GRPO["model_name_or_path"], "lora": {"rank": 32, "alpha": 32}}
    assert model["policy_loss"] == {"clip_range_low": 0.2, "clip_range_high": 0.28}
    assert model["aggregation"]["class_path"].endswith(".TokenMean")  # dapo, TRL's default
    assert model["kl_loss"] == {"coef": 0.04, "estimator": "k3", "importance": True}
    assert model["optimizer"]["lr"] == 1e-6
    assert model["correction"]["init_args"] == {"level": "sequence", "mode": "mask", "upper": 3.0}
    assert loop(run)["rewards"] == [
        {"function": "reward.py:right", "weight": 1.0}, {"function": "my.module.format", "weight": 0.2},
    ]  # fmt: skip
    assert loop(run)["engine"]["init_args"] == {"gpu_memory_utilization": 0.4}
    assert run["logger"]["class_path"].endswith("WandbLogger")


def test_several_updates_of_a_step():
    model, data, *_ = parts(GRPO | {"steps_per_generation": 8, "max_prompt_length": 100}, devices=2)
    assert (data["batch_size"], model["minibatch_size"], data["max_tokens"]) == (16, 64, 100)  # 8 * 8 * 2 responses
    steps = {"steps_per_generation": 8, "num_iterations": 3, "max_steps": 60, "save_steps": 30, "logging_steps": 1}
    _, _, run, _ = parts(GRPO | steps, devices=2)
    saves, lines = (callback["init_args"]["every_n_steps"] for callback in run["callbacks"][1:])
    assert (run["max_steps"], saves, lines) == (10, 5, 1)  # 2 mini-batches, 3 times: 6 updates in a step


def test_options_about_the_whole_batch_are_listed():
    *_, left = parts(GRPO | {"scale_rewards": "batch", "save_steps": 0.1})
    assert [line.partition(":")[0] for line in left[1:]] == ["scale_rewards", "save_steps"]


@pytest.mark.parametrize(
    ("changes", "module", "key", "value"),
    [
        ({"loss_type": "grpo"}, "GRPOModule", "aggregation", None),
        ({"loss_type": "dr_grpo"}, "DrGRPOModule", "aggregation", None),
        ({"loss_type": "cispo"}, "CISPOModule", "policy_loss", None),
        ({"importance_sampling_level": "sequence"}, "GSPOModule", "aggregation", None),
        ({"scale_rewards": False}, "GRPOModule", "advantages", {"normalize_std": False}),
    ],
)
def test_loss_of_grpo_selects_the_module(changes, module, key, value):
    config, left = converted(GRPO | changes, "grpo", 1)
    assert config["model"]["class_path"] == f"lightning_rlhf.{module}"
    assert config["model"]["init_args"].get(key) == value
    assert len(left) == 1


def test_options_that_are_not_here_are_listed_with_the_reason():
    *_, left = parts({**GRPO, "top_p": 0.9, "loss_type": "bnpo", "mine": 1, "warmup_steps": 30, "hub_token": None})
    assert [line.partition(":")[0] for line in left[1:]] == ["top_p", "loss_type", "mine", "warmup_steps"]
    assert "not here: the trainer's log-probabilities would not be those" in left[1]
    assert left[3] == "mine: 1 (unknown to this table)"


@pytest.mark.parametrize(
    ("trainer", "options", "expected"),
    [
        ("sft", {"packing": True}, ("SFTModule", {"lr": 2e-5}, 8)),
        ("dpo", {"beta": 0.3, "loss_type": ["hinge"], "ld_alpha": 0.5}, ("DPOModule", {"lr": 1e-6}, 8)),
        ("kto", {"desirable_weight": 2.0}, ("KTOModule", {"lr": 1e-6}, 8)),
        ("reward", {"center_rewards_coefficient": 0.01}, ("RewardModule", {"lr": 1e-4}, 8)),
        ("rloo", {"reward_clip_range": [-1, 1], "num_generations": 4}, ("RLOOModule", {"lr": 1e-6}, 2)),
    ],
)
def test_other_trainers(tmp_path, monkeypatch, trainer, options, expected):
    module, rates, batch = expected
    options = {"model_name_or_path": "x/y", "dataset_name": "owner/rows"} | options
    assert trainer_of(options) == trainer
    (tmp_path / "given.json").write_text(json.dumps(options))
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.json")]) == 0
    config = yaml.safe_load((tmp_path / "run/run.yaml").read_text())
    assert config["model"]["class_path"] == f"lightning_rlhf.{module}"
    assert config["model"]["init_args"]["optimizer"]["lr"] == rates["lr"]
    assert config["data"]["init_args"]["batch_size"] == batch
    monkeypatch.chdir(tmp_path / "run")
    assert mistakes(["--config", "run.yaml"], "") == {}


def test_names_of_earlier_releases_are_read():
    options = {"max_seq_length": 300, "torch_dtype": "bfloat16", "optim": "adamw_8bit", "lr_scheduler_kwargs": {"a": 1}}
    assert trainer_of(options) == "sft"
    model, data, _, left = parts(options | {"model_name_or_path": "x/y", "use_peft": True}, "sft")
    assert (data["max_tokens"], model["actor"]["init_args"]["dtype"]) == (300, "bfloat16")
    assert model["optimizer"]["class_path"] == "bitsandbytes.optim.AdamW8bit"
    assert model["lr_scheduler"]["init_args"]["arguments"] == {"a": 1}
    assert left == []
    model, *_, left = parts(options, "sft")  # bfloat16 weights would hardly move
    assert model["actor"] == "set the model"
    assert left == ["dtype: bfloat16: trained weights are float32 here, computed in bf16-mixed"]


def test_losses_of_dpo_and_kto():
    model, *_ = parts({"beta": 0.3, "loss_type": ["hinge", "sft"], "loss_weights": [1.0, 0.2]}, "dpo")
    assert (model["loss"]["class_path"].rpartition(".")[2], model["sft_coef"]) == ("HingeLoss", 0.2)
    assert model["loss"]["init_args"] == {"beta": 0.3}
    model, *_ = parts({"undesirable_weight": 0.5}, "kto")
    assert model["loss"] == {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must have options with values, got list"),
        ("{", "cannot be read: "),
        (
            '{"num_generations": 2, "learning_rate": "fast"}',
            "a value that cannot be carried over: could not convert",
        ),
        (
            '{"num_generations": 2, "per_device_train_batch_size": [1]}',
            "a value that cannot be carried over: int()",
        ),
        ('{"learning_rate": 1}', "the options do not show whose they are: add --trainer grpo, rloo, sft"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, text, message):
    (tmp_path / "given.json").write_text(text)
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_converted_run_trains(tmp_path):
    model = str(tmp_path / "models/export")
    command = [sys.executable, "-m", "lightning_rlhf"]
    sft = [str(tmp_path / "first"), "--recipe", "quickstart/sft"]
    assert new.run(sft) == 0
    options = ["--config", "quickstart/sft.yaml", "--trainer.max_steps", "2", "--trainer.default_root_dir", model[:-7]]
    subprocess.run([*command, "fit", *options], cwd=tmp_path / "first", check=True)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    given = {
        "model_name_or_path": model, "dataset_name": str(tmp_path / "rows.jsonl"), "num_generations": 2,
        "max_completion_length": 4, "max_steps": 2, "reward_funcs": ["length"], "max_prompt_length": 16, "bf16": False,
    }  # fmt: skip
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.yaml")]) == 0
    reward = (tmp_path / "run/reward.py").read_text()
    (tmp_path / "run/reward.py").write_text(
        reward.split("raise")[0] + "return [float(len(text)) for text in completions]\n"
    )
    done = subprocess.run(
        [*command, "fit", "--config", "run.yaml"], cwd=tmp_path / "run", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
