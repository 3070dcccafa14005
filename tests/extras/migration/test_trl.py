"""A configuration from options of TRL: their values, those that could not be carried over, and mistakes."""

import importlib
import itertools
import json
import subprocess
import sys

import pytest
import torch
import yaml

from lightning_rlhf.extras.commands import new
from lightning_rlhf.extras.migration.trl import converted, trainer_of
from lightning_rlhf.extras.schema.check import mistakes
from lightning_rlhf.objectives.base import PolicyTokens
from lightning_rlhf.objectives.policy_losses import CISPOLoss, ClippedPolicyLoss

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


LORA = {"rank": 32, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}  # of peft


def parts(options, trainer="grpo", devices=1):
    config, left = converted(options, trainer, devices)
    return config["model"]["init_args"], config["data"]["init_args"], config["trainer"], left


def loop(run):
    return run["callbacks"][0]["init_args"]


def test_a_reference_that_follows_is_carried_over():
    *_, run, left = parts(GRPO | {"sync_ref_model": True, "ref_model_sync_steps": 16, "num_iterations": 2})
    (follows,) = (each for each in run["callbacks"] if each["class_path"].endswith(".FollowingReference"))
    assert follows["init_args"] == {"every_n_steps": 8, "mix": 0.6}  # two updates of a rollout are one step here
    assert "ref_model" not in str(left)
    *_, run, left = parts(GRPO | {"ref_model_sync_steps": 16})
    assert "FollowingReference" not in str(run)
    assert "ref_model_sync_steps: 16 (TRL reads it only with sync_ref_model)" in left


def test_limits_of_the_sampling_are_carried_over():
    *_, run, left = parts(GRPO | {"top_p": 0.9, "top_k": 20, "min_p": 0.05})
    assert {name: loop(run)[name] for name in ("top_p", "top_k", "min_p")} == {"top_p": 0.9, "top_k": 20, "min_p": 0.05}
    *_, run, unlimited = parts(GRPO | {"top_p": 1.0, "top_k": -1, "min_p": None})
    assert not {"top_p", "top_k", "min_p"} & loop(run).keys()
    assert left == unlimited


def test_sizes_of_grpo_count_prompts_over_all_devices():
    model, data, run, left = parts(GRPO, devices=4)
    assert (data["batch_size"], loop(run)["group_size"], run["devices"]) == (16, 8, 4)  # 8 * 4 * 4 responses
    assert "minibatch_size" not in model  # one update of all responses
    assert left == ["max_tokens of the data is 512: added, because TRL has no limit; a longer prompt is a bad row"]
    assert model["actor"]["init_args"] == {"path": GRPO["model_name_or_path"], "lora": LORA}
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
    *_, left = parts(GRPO | {"scale_rewards": "groupy", "eval_strategy": "step"})
    assert {"scale_rewards: 'groupy'", "eval_strategy: 'step'"} <= {line.partition(" (")[0] for line in left}
    *_, left = parts(GRPO | {"evaluation_strategy": "step"})
    assert "evaluation_strategy: 'step'" in {line.partition(" (")[0] for line in left}


MEAN, SUM, TOKENS = "SequenceMeanTokenMean", "SequenceMeanTokenSum", "TokenMean"


@pytest.mark.parametrize(
    ("changes", "module", "aggregation", "policy_loss"),
    [
        ({"loss_type": "grpo"}, "GRPOModule", MEAN, {"clip_range_low": 0.2, "clip_range_high": 0.28}),
        ({"loss_type": "dr_grpo"}, "GRPOModule", SUM, {"clip_range_low": 0.2, "clip_range_high": 0.28}),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "DrGRPOModule", SUM,
         {"clip_range_low": 0.2, "clip_range_high": 0.28}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "CISPOModule", TOKENS, {"clip_range_high": 4.0}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.1}, "SAPOModule", MEAN, {"tau_neg": 1.1}),
        ({"loss_type": "vespo", "vespo_k_pos": 1.5}, "GRPOModule", TOKENS, {"k_pos": 1.5}),
        ({"importance_sampling_level": "sequence"}, "GSPOModule", TOKENS,
         {"clip_range_low": 0.2, "clip_range_high": 0.28}),
        ({"importance_sampling_level": "sequence", "loss_type": "luspo"}, "GSPOModule", SUM,
         {"clip_range_low": 0.2, "clip_range_high": 0.28}),
    ],
)  # fmt: skip
def test_loss_of_grpo_selects_the_module(changes, module, aggregation, policy_loss):
    config, left = converted(GRPO | changes, "grpo", 1)
    options = config["model"]["init_args"]
    assert config["model"]["class_path"] == f"lightning_rlhf.{module}"
    assert options["aggregation"]["class_path"].endswith(f".{aggregation}")
    loss = options["policy_loss"]
    assert loss.get("init_args", loss) == policy_loss
    assert len(left) == 1


def test_divisor_and_deviation_of_grpo():
    changes = {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 300}
    model, *_ = parts(GRPO | changes)
    assert model["aggregation"]["init_args"] == {"scale": 300.0}
    assert model["advantages"] == {"eps": 1e-4, "normalize_std": False}


def trl_loss(kind, level, logprobs, old, advantages, mask):
    """The loss of GRPOTrainer of TRL 1.16 with epsilon 0.2, in loops of plain numbers."""
    total, tokens = 0.0, int(mask.sum())
    for row in range(len(mask)):
        ratios = (logprobs[row] - old[row]).exp()[mask[row]]
        if level == "sequence":
            ratios = torch.full_like(ratios, float((logprobs[row] - old[row])[mask[row]].mean().exp()))
        a = float(advantages[row])
        losses = [-min(float(r) * a, min(max(float(r), 0.8), 1.2) * a) for r in ratios]
        if kind == "cispo":
            losses = [-min(float(r), 5.0) * a * float(x) for r, x in zip(ratios, logprobs[row][mask[row]], strict=True)]
        whole = sum(losses)
        total += {"grpo": whole / len(losses) / len(mask), "dr_grpo": whole / 4 / len(mask)}.get(kind, whole / tokens)
    return total


@pytest.mark.parametrize(
    ("kind", "level"),
    [*itertools.product(["grpo", "dr_grpo", "dapo", "bnpo"], ["token", "sequence"]), ("cispo", "token")],
)
def test_losses_are_those_of_trl(kind, level):
    draws = torch.Generator().manual_seed(0)
    logprobs, old = (-torch.rand(3, 4, generator=draws, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    options = {"loss_type": kind, "importance_sampling_level": level, "max_completion_length": 4}
    model, *_ = parts(GRPO | options | {"epsilon_high": 5.0 if kind == "cispo" else 0.2})
    loss = model["policy_loss"]
    if "class_path" not in loss:
        loss = {"class_path": {"cispo": CISPOLoss}.get(kind, ClippedPolicyLoss), "init_args": loss}
    policy_loss, aggregation = built(loss), built(model["aggregation"])
    tokens = PolicyTokens.of(logprobs * mask, old * mask, advantages[:, None] * mask, mask)
    losses, _ = policy_loss.token_losses(tokens)
    value = (losses * aggregation.weights(mask)).sum() / aggregation.denominator(mask)
    assert value.item() == pytest.approx(trl_loss(kind, level, logprobs, old, advantages, mask), rel=1e-9)


def built(entry):
    kind = entry["class_path"]
    if isinstance(kind, str):
        room, _, name = kind.rpartition(".")
        kind = getattr(importlib.import_module(room), name)
    return kind(**entry.get("init_args", {}))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"loss_type": "cispo"}, "epsilon_high: 0.28 (0.28 bounds CISPO's weights in TRL"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "importance_sampling_level: 'sequence' (sapo"),
        ({"lora_dropout": 0.1}, "lora_dropout: 0.1 (importance ratios compare two passes"),
        ({"num_generatons": 4}, "num_generatons: 4 (TRL 1.16 has no such option; did you mean num_generations?)"),
        ({"vllm_mode": "server"}, "vllm_mode: 'server' (start the server with the command of docs/rollouts.md"),
        ({"model_name_or_path": None}, "model_name_or_path: the file names no model"),
        ({"dataset_name": None}, "dataset_name: the file names no data"),
    ],
)
def test_what_has_another_meaning_is_listed(changes, line):
    *_, left = parts(GRPO | changes)
    assert any(each.startswith(line) for each in left), left


def test_sizes_and_names_are_carried_over():
    given = {
        "warmup_steps": 30, "max_steps": 600, "run_name": "mine", "project": "p", "num_generations_eval": 4,
        "reward_funcs": None, "reward_weights": None, "reward_model_name_or_path": "x/reward",
        "vllm_tensor_parallel_size": 2,
    }  # fmt: skip
    model, _, run, left = parts(GRPO | given, devices=2)
    assert model["lr_scheduler"]["init_args"]["warmup_ratio"] == 0.05
    assert model["reward_model"] == "x/reward"
    assert "rewards" not in loop(run)
    assert loop(run)["val_samples"] == 4
    assert loop(run)["engine"]["class_path"].endswith("SharedEngine")
    assert run["logger"]["init_args"] == {"name": "mine", "project": "p"}
    assert len(left) == 1


def test_lengths_dropout_and_text_of_supervised_runs():
    given = {"model_name_or_path": "x/y", "dataset_name": "o/r", "use_peft": True}
    model, data, *_ = parts(given | {"dataset_text_field": "body"}, "sft")
    assert (model["actor"]["init_args"]["lora"]["dropout"], data["columns"]) == (0.05, {"text": "body"})
    model, data, _, left = parts(given | {"max_length": None, "lora_dropout": 0.1}, "dpo")  # TRL's DPO has none either
    assert "dropout" not in model["actor"]["init_args"]["lora"]
    assert (data["max_tokens"], data["too_long"]) == (32_768, "bad_row")
    assert left == ["max_length: null: a text beyond 32768 tokens, max_tokens here, is a bad row"]
    model, *_ = parts(given | {"lora_dropout": 0.1, "disable_dropout": False}, "dpo")
    assert model["actor"]["init_args"]["lora"]["dropout"] == 0.1


def test_fractions_of_a_run_and_values_with_another_name():
    given = {
        "eval_strategy": "steps", "eval_steps": 0.1, "logging_steps": 0.1, "num_train_epochs": 1.5, "max_grad_norm": 0,
        "shuffle_dataset": False, "model_init_kwargs": {"revision": "abc"}, "lora_target_modules": "all-linear",
    }  # fmt: skip
    model, data, run, left = parts(GRPO | given)
    assert (run["val_check_interval"], run["max_epochs"]) == (0.1, 2)
    assert (model["max_grad_norm"], data["shuffle"]) == (None, False)
    assert model["actor"]["init_args"]["revision"] == "abc"
    assert "target_modules" not in model["actor"]["init_args"]["lora"]
    names = [line.partition(":")[0] for line in left]
    assert names == ["max_tokens of the data is 512", "eval_steps", "logging_steps", "num_train_epochs"]
    *_, run, _ = parts(GRPO | {"eval_strategy": "epoch", "eval_steps": 500})
    assert "val_check_interval" not in run


def test_rewards_of_trl_are_those_of_the_package():
    *_, run, left = parts(GRPO | {"reward_funcs": ["accuracy_reward"], "reward_weights": [0.5], "beta": 0.0})
    assert loop(run)["rewards"] == [{"function": "trl.rewards.accuracy_reward", "messages": True, "weight": 0.5}]
    assert left[-1] == "reward_funcs: accuracy_reward is one of TRL's own, which must be installed: pip install trl"


def test_activations_are_checkpointed_as_by_default():
    *_, run, _ = parts(GRPO)
    assert run["strategy"]["init_args"] == {"activation_checkpointing": True}
    *_, run, _ = parts(GRPO | {"gradient_checkpointing": False}, devices=2)
    assert run["strategy"] == "rlhf_ddp"


def test_options_that_are_not_here_are_listed_with_the_reason():
    *_, left = parts(
        {**GRPO, "repetition_penalty": 1.1, "loss_type": "bnpo", "mine": 1, "warmup_steps": 30, "hub_token": None}
    )
    assert [line.partition(":")[0] for line in left[2:]] == ["repetition_penalty", "mine", "warmup_steps"]
    assert left[0] == "loss_type: 'bnpo' is the mean over the tokens of a micro-batch in TRL, of an update here"
    assert "not here: " in left[2]
    assert left[3] == "mine: 1 (TRL 1.16 has no such option)"


@pytest.mark.parametrize(
    ("trainer", "options", "expected"),
    [
        ("sft", {"packing": True}, ("SFTModule", {"lr": 2e-5}, 8)),
        ("dpo", {"beta": 0.3, "loss_type": ["hinge"], "ld_alpha": 0.5}, ("DPOModule", {"lr": 1e-6}, 8)),
        ("kto", {"desirable_weight": 2.0}, ("KTOModule", {"lr": 1e-6}, 8)),
        ("reward", {"center_rewards_coefficient": 0.01}, ("RewardModule", {"lr": 1e-4}, 8)),
        ("cpo", {"cpo_alpha": 0.0, "loss_type": "simpo"}, ("DPOModule", {"lr": 1e-6}, 8)),
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
    options = {
        "dataset_name": "o/r",
        "max_seq_length": 300,
        "torch_dtype": "bfloat16",
        "optim": "adamw_8bit",
        "lr_scheduler_kwargs": {"a": 1},
    }
    options |= {"model_name_or_path": "x/y"}
    assert trainer_of(options) == "sft"
    model, data, _, left = parts(options | {"use_peft": True}, "sft")
    assert (data["max_tokens"], model["actor"]["init_args"]["dtype"]) == (300, "bfloat16")
    assert model["optimizer"]["class_path"] == "bitsandbytes.optim.AdamW8bit"
    assert model["lr_scheduler"]["init_args"]["arguments"] == {"a": 1}
    assert left == []
    model, *_, left = parts(options, "sft")  # bfloat16 weights would hardly move
    assert model["actor"] == "x/y"
    assert left == ["torch_dtype: bfloat16: trained weights are float32 here, computed in bf16-mixed"]


def test_losses_without_a_reference():
    model, *_, left = parts({"model_name_or_path": "x/y", "dataset_name": "o/r", "beta": 0.3}, "orpo")
    assert model["loss"]["class_path"].endswith(".ORPOLoss")
    assert (model["loss"]["init_args"], model["sft_coef"]) == ({"beta": 0.3}, 1.0)
    assert len(left) == 1
    model, *_ = parts({"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.5}, "cpo")
    assert model["loss"]["init_args"] == {"beta": 0.1, "margin": 0.7, "length_normalized": True}
    assert model["sft_coef"] == 0.5
    model, *_ = parts({"cpo_alpha": 0.5}, "cpo")  # its sigmoid loss is of sums, without a margin
    assert model["loss"]["init_args"] == {"beta": 0.1, "margin": 0.0, "length_normalized": False}


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
        ('{"num_generations": 2, "reward_funcs": ["a"], "reward_weights": [1, 2]}', "has 2 numbers for 1 reward_funcs"),
        (
            '{"learning_rate": 1}',
            "the options do not show which trainer they are for: add --trainer sft, dpo, kto, reward, orpo, cpo",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, text, message):
    (tmp_path / "given.json").write_text(text)
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", "python -m verl.trainer.main_ppo a.b=1", "for a script of verl, use --from-verl"),
        ("train.py", "GRPOConfig()", "write its options to a YAML file"),
    ],
)
def test_a_program_is_not_a_file_of_options(tmp_path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_project_explains_itself(tmp_path, capsys):
    (tmp_path / "given.json").write_text(json.dumps(GRPO | {"repetition_penalty": 1.1}))
    assert new.run([str(tmp_path / "my run"), "--from-trl", str(tmp_path / "given.json")]) == 0
    text = (tmp_path / "my run/README.md").read_text()
    assert f"cd '{tmp_path}/my run'\nlightning-rlhf check-data --config run.yaml" in text
    assert "- repetition_penalty: 1.1 (not here:" in text
    assert f"  cd '{tmp_path}/my run'" in capsys.readouterr().out
    arguments = [str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.json"), "--devices", "0"]
    assert new.run(arguments) == 2
    assert "--devices must be at least 1, got 0" in capsys.readouterr().err


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
