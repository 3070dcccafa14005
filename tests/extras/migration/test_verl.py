"""A configuration from a script of verl, which is read and never executed."""

import re
import warnings
from pathlib import Path

import pytest
import yaml

from lightning_rlhf.extras.commands import new
from lightning_rlhf.extras.commands.run_config import parse_run_config
from lightning_rlhf.extras.migration.shell import overrides
from lightning_rlhf.extras.migration.verl import converted
from lightning_rlhf.extras.schema.check import mistakes

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = r"""#!/usr/bin/env bash
set -x
touch executed   # never
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
BASE=${BASE:-"${HOME}/verl"}
DATA="${BASE}/data"
n_resp=8
prompt_length=$((1024 * 2))
tokens=$(( (prompt_length + 1024) / 1 ))
DATA_ARGS=(
    data.train_files="['$DATA/gsm8k/train.parquet', '$DATA/math/train.parquet']"
    data.max_prompt_length=${prompt_length}   # of a prompt
    data.max_response_length=1024
)
python3 -m verl.trainer.main_ppo \
    "${DATA_ARGS[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=64 data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.n=${n_resp} \
    actor_rollout_ref.rollout.top_p=0.9 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.logger='["console","wandb"]' trainer.project_name=p trainer.experiment_name=mine \
    trainer.default_local_dir=$(date +%s) \
    +trainer.mine=1 trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.save_freq=20 trainer.total_epochs=15 $@
"""


def test_script_becomes_a_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert new.run(["mine", "--from-verl", "run.sh"]) == 0
    assert not (tmp_path / "executed").exists()
    config = yaml.safe_load((tmp_path / "mine/run.yaml").read_text())
    model, data, run = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    loop = run["callbacks"][0]["init_args"]
    assert config["model"]["class_path"] == "lightning_rlhf.GRPOModule"
    assert model["actor"]["init_args"] == {"path": "Qwen/Qwen2.5-0.5B-Instruct", "lora": {"rank": 32, "alpha": 16}}
    assert (model["minibatch_size"], model["micro_batch_tokens"]) == (32 * 8, 3072)
    assert (model["optimizer"]["lr"], model["kl_loss"]) == (3e-6, {"coef": 0.001, "estimator": "k3"})
    assert model["policy_loss"]["class_path"].endswith(".ClippedPolicyLoss")
    assert model["policy_loss"]["init_args"] == {"clip_range_low": 0.2, "clip_range_high": 0.28, "dual_clip": 3.0}
    assert data["train"] == ["~/verl/data/gsm8k/train.parquet", "~/verl/data/math/train.parquet"]
    assert (data["batch_size"], data["max_tokens"], data["too_long"]) == (64, 2048, "drop")
    assert (loop["group_size"], loop["max_response_tokens"], loop["top_p"]) == (8, 1024, 0.9)
    assert "top_k" not in loop
    assert loop["engine"]["init_args"]["ranks"] == 2
    assert (run["devices"], run["num_nodes"], run["max_epochs"], run["default_root_dir"]) == (8, 2, 15, "runs/mine")
    assert run["logger"]["init_args"] == {"project": "p", "name": "mine"}
    assert mistakes(["--config", "mine/run.yaml"], "") == {}
    printed = capsys.readouterr().out
    for line in (
        "trainer.default_local_dir: '$OUTPUT' depends on the machine",
        "trainer.mine: 1 (the table of verl's example scripts has no such option)",
    ):
        assert line in printed


def test_page_shows_what_its_script_becomes(tmp_path, monkeypatch, capsys):
    """docs/from_verl.md: its YAML means what the command writes for its script, and its lines are those printed."""
    page = (ROOT / "docs/from_verl.md").read_text()
    script = re.search(r"^```text\n(python -m verl.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    shown = re.search(r"^```yaml\n(seed_everything.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    printed = re.search(r"^```text\n(wrote my_run.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    Path("run_qwen2-7b.sh").write_text(script)
    Path("shown.yaml").write_text(shown)
    assert new.run(["my_run", "--from-verl", "run_qwen2-7b.sh"]) == 0
    assert capsys.readouterr().out.strip() == printed.strip()
    warnings.simplefilter("ignore")  # of jsonargparse; pytest restores the filters
    meanings = []
    for file in ("shown.yaml", "my_run/run.yaml"):
        config = parse_run_config(["--config", file]).as_dict()
        loss, run = config["model"]["init_args"]["policy_loss"], config["trainer"]
        for side in ("clip_range_low", "clip_range_high"):
            loss["init_args"][side] = loss["init_args"][side] or loss["init_args"]["clip_range"]
        run["callbacks"] = run["callbacks"][:1]  # RunCheckpoint with its defaults is added anyway
        run.pop("val_check_interval")  # without validation rows
        meanings.append({part: config[part] for part in ("seed_everything", "model", "data", "trainer")})
    assert str(meanings[0]) == str(meanings[1])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", "1"),
        ("X=1\nY=$X$X\ncall a.b=${Y}", "11"),
        ("X=${X:-${Z:-3}}\ncall a.b=$X", "3"),
        ("call a.b=$((2 * (3 + 4)))", "14"),
        ("x=5\ncall a.b=$((x * 2 - 1))", "9"),
        ("call 'a.b=two words' # a.b=no", "two words"),
        ('call a.b="first\nsecond"', "first\nsecond"),
        ("ARGS=(\n  a.b=1  # one\n  c.d=2\n)\ncall ${ARGS[@]}", "1"),
        ("call a.b=$((9**9**9))", None),
        ("call a.b=$((__import__('os').getpid()))", None),
        ("call a.b=`whoami`", None),
        ("call a.b=$UNKNOWN", None),
    ],
)
def test_values_of_a_script(text, value):
    options, notes = overrides(text)
    assert options.get("a.b") == value
    assert bool(notes) == (value is None)


def test_conditions_are_named():
    options, notes = overrides("if [ $1 = a ]; then\n  X=1\nelse\n  X=2\nfi\ncall a.b=$X")
    assert options == {"a.b": "2"}
    assert notes == ["the script has conditions: the values of all branches are read, and the last one counts"]


@pytest.mark.parametrize(
    ("estimator", "module"),
    [("gae", "PPOModule"), ("rloo", "RLOOModule"), ("grpo", "GRPOModule"), ("mine", "GRPOModule")],
)
def test_estimator_selects_the_module(estimator, module):
    config, left = converted({"algorithm.adv_estimator": estimator, "algorithm.use_kl_in_reward": "True"})
    assert config["model"]["class_path"] == f"lightning_rlhf.{module}"
    assert config["model"]["init_args"]["kl_reward"] == {"coef": 0.001, "estimator": "k1"}
    assert any("adv_estimator" in line for line in left) == (estimator == "mine")


def listed(options):
    """Return the configuration, and what is listed but the advice to copy the reward."""
    config, left = converted(BASE | options)
    return config, [line for line in left if not line.startswith("custom_reward_function: copy r.py")]


BASE = {
    "actor_rollout_ref.model.path": "x/y",
    "data.train_files": "rows.parquet",
    "custom_reward_function.path": "r.py",
}


def test_options_of_the_critic():
    options = {
        "algorithm.adv_estimator": "gae", "trainer.critic_warmup": "3", "critic.cliprange_value": "0.2",
        "critic.ppo_epochs": "4", "critic.ppo_mini_batch_size": "256", "critic.grad_clp": "1",
    }  # fmt: skip
    config, left = listed(options)
    model = config["model"]["init_args"]
    assert (model["critic_warmup_steps"], model["value_loss"]) == (2, {"clip_range": 0.2})
    epochs, unknown = left
    assert epochs == "critic.ppo_epochs: 4 (critic and actor have one value: 1)"
    assert unknown == "critic.grad_clp: 1 (the table of verl's example scripts has no such option)"


def test_groups_overlong_answers_and_sums_of_dapo():
    options = {
        "algorithm.adv_estimator": "grpo", "algorithm.filter_groups.enable": "True",
        "algorithm.filter_groups.metric": "acc", "algorithm.filter_groups.max_num_gen_batches": "3",
        "data.train_batch_size": "16", "data.gen_batch_size": "40", "data.max_response_length": "100",
        "reward_model.overlong_buffer.enable": "True", "reward_model.overlong_buffer.len": "20",
        "reward_model.overlong_buffer.penalty_factor": "0.5", "reward_model.reward_manager": "dapo",
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
    }  # fmt: skip
    config, left = listed(options)
    loop = config["trainer"]["callbacks"][0]["init_args"]
    assert config["data"]["init_args"]["batch_size"] == 48  # 40 prompts, in whole steps of 16
    assert loop["dynamic_sampling"] == {"prompts_per_step": 16}
    penalty = {"class_path": "lightning_rlhf.rewards.shaping.OverlongPenalty"}
    penalty["init_args"] = {"max_tokens": 100, "buffer_tokens": 20}
    assert loop["rewards"] == [{"function": "r.py:compute_score"}, {"function": penalty, "weight": 0.5}]
    aggregation = config["model"]["init_args"]["aggregation"]
    assert aggregation["class_path"].endswith(".SequenceMeanTokenSum")
    assert aggregation["init_args"] == {"scale": 100.0}
    assert [line.partition(":")[0] for line in left] == [
        "loss_agg_mode",
        "filter_groups",
        "algorithm.filter_groups.metric",
    ]


@pytest.mark.parametrize(
    ("options", "run", "at_ends", "note"),
    [
        ({"trainer.test_freq": "5"}, {"val_check_interval": 5}, None, ""),
        (
            {"trainer.test_freq": "5", "trainer.val_before_train": "False"},
            {"val_check_interval": 5},
            False,
            "last step",
        ),
        ({"trainer.test_freq": "-1", "trainer.val_before_train": "False"}, {"limit_val_batches": 0}, False, ""),
        ({"data.val_files": "val.parquet"}, {"val_check_interval": 1_000_000_000}, None, "before and after the run"),
    ],
)
def test_validations(options, run, at_ends, note):
    config, left = listed({"algorithm.adv_estimator": "grpo"} | options)
    assert run.items() <= config["trainer"].items()
    assert config["trainer"]["callbacks"][0]["init_args"].get("validate_at_ends") == at_ends
    assert [note in line for line in left] == [True] * bool(note)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            "True",
            "cpu_offload keeps the weights there as well",
        ),
        ("data.train_batch_sise", "4", "has no such option; did you mean data.train_batch_size?"),
        ("actor_rollout_ref.model.path", "", "the script names no model"),
    ],
)
def test_what_has_another_meaning_is_listed(name, value, line):
    _, left = converted(BASE | {"algorithm.adv_estimator": "grpo", name: value})
    assert any(line in each for each in left), left


def test_names_of_today_and_words_for_schedules():
    options = {
        "algorithm.adv_estimator": "gae", "custom_reward_function.path": "",
        "reward.custom_reward_function.path": "mine.py", "reward.custom_reward_function.name": "score",
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "critic.optim.weight_decay": "0.02",
        "actor_rollout_ref.actor.optim.min_lr_ratio": "0.1", "actor_rollout_ref.rollout.top_p": "1.0",
        "reward_model.enable": "True", "reward_model.model.path": "x/reward",
    }  # fmt: skip
    given = {name: value for name, value in BASE.items() if name != "custom_reward_function.path"}
    config, left = converted(given | options)
    model, loop = config["model"]["init_args"], config["trainer"]["callbacks"][0]["init_args"]
    assert loop["rewards"] == [{"function": "mine.py:score"}]
    schedule = {"kind": "cosine_with_min_lr", "warmup_ratio": 0.0, "arguments": {"min_lr_rate": 0.1}}
    assert model["lr_scheduler"]["init_args"] == schedule
    assert model["critic_optimizer"]["weight_decay"] == 0.02
    tokenizer, copied, added = left
    assert tokenizer.startswith("reward_model: x/reward must have the policy's tokenizer")
    assert copied.startswith("custom_reward_function: copy mine.py")
    assert added == "reward_model and custom_reward_function are added up here; verl takes one of them"


MINE = """
hydra:
  searchpath: [file://verl/trainer/config]
defaults:
  - ppo_trainer
  - data: of_others
  - _self_
data:
  train_files: [a.parquet, b.parquet]
  max_prompt_length: 300
  train_batch_size: 64
  seed: ${oc.env:SEED}
actor_rollout_ref:
  model:
    path: x/y
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}
    ppo_epochs: ${oc.select:none.such,3}
    clip_ratio: 0.3
    clip_ratio_low: ${.clip_ratio}
    optim: {lr: 2e-6}
algorithm:
  adv_estimator: grpo
"""


def test_configuration_that_the_script_names_is_read_below_its_options(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text(MINE)
    start = "DIR=$(pwd)/config\npython3 -m verl.trainer.main_ppo --config-path=\"$DIR\" --config-name='mine' $@"
    options, notes = overrides(f"{start} data.max_prompt_length=500", tmp_path)
    assert options == {
        "data.train_files": '["a.parquet", "b.parquet"]', "data.max_prompt_length": "500",
        "data.train_batch_size": "64", "actor_rollout_ref.model.path": "x/y",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "64", "actor_rollout_ref.actor.ppo_epochs": "3",
        "actor_rollout_ref.actor.clip_ratio": "0.3", "actor_rollout_ref.actor.clip_ratio_low": "0.3",
        "actor_rollout_ref.actor.optim.lr": "2e-6", "algorithm.adv_estimator": "grpo",
    }  # fmt: skip
    assert notes[:2] == [
        "defaults of mine.yaml: 'data: of_others' is not read; its values that differ from verl's are lost",
        "data.seed: '${oc.env:SEED}' refers to what mine.yaml does not say",
    ]
    alone, _ = overrides(start, tmp_path)
    assert alone == {**options, "data.max_prompt_length": "300"}


def test_script_with_all_options_in_a_configuration_becomes_the_run_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "run.sh").write_text("python -m verl.trainer.main_ppo -cp config -cn mine\n")
    assert new.run(["a", "--from-verl", "run.sh"]) == 0
    assert new.run(["b", "--from-verl", "mine.yaml"]) == 0
    first, second = (yaml.safe_load((tmp_path / name / "run.yaml").read_text()) for name in "ab")
    assert first == second
    assert first["model"]["init_args"]["optimizer"]["lr"] == 2e-6
    assert first["data"]["init_args"]["train"] == ["a.parquet", "b.parquet"]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "run.sh",
            "python -m verl.trainer.main_ppo --config-name=mine",
            "run.sh has no options of verl; --config-name=mine",
        ),
        ("mine.yaml", "- a\n- b\n", "mine.yaml must be a mapping of options, as verl's configurations are"),
        ("mine.yaml", "a: {b", "mine.yaml cannot be read: while parsing a flow mapping"),
        ("mine.yaml", "a: 1\n", "the script has no options of verl's main_ppo or of its SFT trainer"),
    ],
)
def test_configuration_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, capsys, name, text, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert new.run(["run", "--from-verl", name]) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"lightning-rlhf: {line}")


def test_configuration_that_is_not_here_is_named():
    _, notes = overrides("python -m verl.trainer.main_ppo --config-name='mine' a.b=1")
    assert notes[0].startswith("--config-name=mine: there is no such file here, so its values that differ from verl's")


def test_configuration_with_the_defaults_of_verl_says_so(tmp_path):
    (tmp_path / "all.yaml").write_text("a: {_target_: verl.A, b: 1, c: '???'}\n")
    options, notes = overrides("python -m verl.trainer.main_ppo --config-name=all", tmp_path)
    assert options == {"a.b": "1"}
    assert notes == ["all.yaml has verl's defaults too, so this list names options that you did not set"]


SFT = """torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=$HOME/a.parquet data.prompt_key=extra_info \\
    data.response_key=extra_info data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] optim.lr=1e-4 \\
    model.partial_pretrain=x/y model.lora_rank=32 data.micro_batch_size_per_gpu=4 trainer.total_epochs=1 $@
"""


def test_script_of_supervised_training_becomes_a_run(tmp_path, monkeypatch):
    (tmp_path / "sft.sh").write_text(SFT)
    monkeypatch.chdir(tmp_path)
    assert new.run(["mine", "--from-verl", "sft.sh"]) == 0
    config = yaml.safe_load((tmp_path / "mine/run.yaml").read_text())
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    assert model["optimizer"] == {"lr": 1e-4, "weight_decay": 0.01, "betas": [0.9, 0.95]}
    assert model["actor"]["init_args"]["lora"] == {"rank": 32, "alpha": 16}
    assert data["columns"] == {"prompt": "extra_info.question", "completion": "extra_info.answer"}
    assert (data["batch_size"], data["max_tokens"], config["trainer"]["max_epochs"]) == (256, 1024, 1)
    assert mistakes(["--config", "mine/run.yaml"], "") == {}


def test_script_of_something_else_is_an_error(tmp_path, capsys):
    (tmp_path / "run.sh").write_text("python train.py --lr 1\n")
    assert new.run([str(tmp_path / "run"), "--from-verl", str(tmp_path / "run.sh")]) == 2
    assert "the script has no options of verl's main_ppo or of its SFT trainer" in capsys.readouterr().err
