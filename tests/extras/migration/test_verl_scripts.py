"""``new --from-verl`` reads a script as the shell and Hydra do, and loses no option without a line that names it."""

import pytest
import yaml

from lightning_rlhf.extras.commands import new
from lightning_rlhf.extras.migration.verl import counterpart
from lightning_rlhf.extras.schema.check import mistakes

PPO = "python3 -m verl.trainer.main_ppo"
GRPO = "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=x/y data.train_files=gsm8k.parquet"
SFT = "torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=x/y data.train_files=rows.parquet"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Converted:
    """A project of ``new --from-verl``: parts of its configuration, and the lines about what was not carried over."""

    def __init__(self, directory, output):
        self.config = yaml.safe_load((directory / "run.yaml").read_text())
        self.model, self.data = (self.config[part]["init_args"] for part in ("model", "data"))
        self.run = self.config["trainer"]
        self.callbacks = {each["class_path"].rpartition(".")[2]: each["init_args"] for each in self.run["callbacks"]}
        self.loop = self.callbacks.get("RolloutLoop", {})
        text = output.partition("not carried over:\n")[2].partition("\n\n")[0]
        self.left = [line.strip() for line in text.splitlines()]

    @property
    def engine(self):
        return self.loop["engine"]["init_args"]

    def line(self, name):
        """The line about an option or a word of the script; empty without one."""
        return next((line for line in self.left if line.startswith(f"{name}: ")), "")


@pytest.fixture
def convert(tmp_path, capsys):
    numbers = iter(range(10_000))

    def convert(script):
        directory = tmp_path / f"run{next(numbers)}"
        file = directory.with_suffix(".sh")
        file.write_text(script)
        code = new.run([str(directory), "--from-verl", str(file)])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        project = Converted(directory, captured.out)
        assert mistakes([f"--config={directory / 'run.yaml'}"], "") == {}
        return project

    return convert


def test_options_of_the_sft_trainer_without_a_dot(convert):
    flags = "ulysses_sequence_parallel_size=2 use_remove_padding=true trainer_mode=fast"
    project = convert(f"N=4\n{SFT.replace('-m', '--nnodes=2 --nproc_per_node=$N -m')} {flags}\n")
    assert project.run["strategy"]["init_args"]["sequence_parallel_size"] == 2
    assert (project.run["devices"], project.run["num_nodes"]) == (4, 2)
    assert (
        project.line("trainer_mode") == "trainer_mode: 'fast' (the table of verl's example scripts has no such option)"
    )
    assert project.line("use_remove_padding") == ""
    assert "ulysses_sequence_parallel_sise" in convert(f"{SFT} ulysses_sequence_parallel_sise=2").left[-1]


def test_groups_of_options_select_what_is_not_here(convert):
    project = convert(
        "torchrun -m verl.trainer.sft_trainer model.path=x/y engine=megatron optim=megatron model=hf_model"
    )
    assert project.line("engine").startswith("engine: 'megatron'")
    assert convert(f"{PPO} {GRPO} model_engine=megatron").line("model_engine").startswith("model_engine: 'megatron'")
    assert convert(f"{PPO} {GRPO} model_engine=dp").line("model_engine") == ""


def test_both_sft_trainers_have_their_own_defaults(convert):
    old = convert(f"{SFT} trainer.save_freq=10 trainer.max_ckpt_to_keep=2 trainer.test_freq=after_each_epoch")
    assert old.model["optimizer"] == {"lr": 1e-5, "weight_decay": 0.01, "betas": [0.9, 0.95]}
    assert old.model["lr_scheduler"]["init_args"] == {"kind": "cosine", "warmup_ratio": 0.1}
    assert old.data["columns"] == {"prompt": "question", "completion": "answer"}
    assert old.callbacks["RunCheckpoint"] == {"every_n_steps": 10, "keep_last": 2}
    assert old.line("trainer.test_freq").startswith("trainer.test_freq: 'after_each_epoch'")
    new_one = convert("torchrun -m verl.trainer.sft_trainer model.path=x/y optim.min_lr_ratio=0.1 engine.fsdp_size=4")
    assert new_one.model["optimizer"] == {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999]}
    assert "lr_scheduler" not in new_one.model
    assert "columns" not in new_one.data
    assert new_one.run["strategy"]["init_args"]["shard_size"] == 4
    assert new_one.line("optim.min_lr_ratio") != ""  # of a constant rate
    columns = convert(f"{SFT} data.multiturn.enable=True data.multiturn.messages_key=talk").data["columns"]
    assert columns == {"messages": "talk"}


def test_options_of_the_engine(convert):
    values = {
        "gpu_memory_utilization": 0.8, "tensor_model_parallel_size": 2, "max_num_batched_tokens": 16384,
        "max_num_seqs": 512, "enable_chunked_prefill": False, "enforce_eager": True, "enable_prefix_caching": False,
    }  # fmt: skip
    project = convert(f"{PPO} {GRPO} " + " ".join(f"{ROLLOUT}.{name}={value}" for name, value in values.items()))
    arguments = {name: values[name] for name in list(values)[2:]}
    assert project.engine["ranks"] == 2
    assert project.engine["engine"]["init_args"] == {
        "gpu_memory_utilization": 0.8,
        "tensor_parallel_size": 2,
        "sleep_while_learning": True,  # verl's default
        "arguments": arguments,
    }
    assert not [line for line in project.left if ROLLOUT in line]


def test_values_that_the_engine_has_anyway(convert):
    given = "enable_chunked_prefill=True enforce_eager=False free_cache_engine=False gpu_memory_utilization=0.5"
    project = convert(f"{PPO} {GRPO} " + " ".join(f"{ROLLOUT}.{each}" for each in given.split()))
    assert project.engine == {"gpu_memory_utilization": 0.5}


def test_longest_text_of_the_engine(convert):
    lengths = f"{PPO} {GRPO} data.max_prompt_length=100 data.max_response_length=200 {ROLLOUT}.max_model_len="
    assert convert(lengths + "300").line(f"{ROLLOUT}.max_model_len") == ""
    assert "may have 300 tokens here" in convert(lengths + "256").line(f"{ROLLOUT}.max_model_len")


def test_other_engines(convert):
    project = convert(f"{PPO} {GRPO} {ROLLOUT}.name=sglang {ROLLOUT}.tensor_model_parallel_size=2")
    assert project.engine["ranks"] == 2
    assert project.line(f"{ROLLOUT}.name") == f"{ROLLOUT}.name: 'sglang' (VLLMEngine takes the place of sglang)"
    assert convert(f"{PPO} {GRPO} {ROLLOUT}.name=hf").loop["engine"] == "transformers"


@pytest.mark.parametrize("name", ["reward_model.reward_manager", "reward.reward_manager.name"])
@pytest.mark.parametrize(
    ("manager", "words"),
    [
        ("naive", ""), ("dapo", ""), ("batch", ""), ("prime", ""), ("gdpo", "write a function for each"),
        ("rate_limited", "JudgeReward"), ("remote", "timeout_s"), ("mine", "write what it computes"),
    ],
)  # fmt: skip
def test_every_reward_manager_says_what_to_write(convert, manager, words, name):
    project = convert(f"{PPO} {GRPO} {name}={manager} custom_reward_function.path=r.py")
    (reward,) = project.loop["rewards"]
    assert reward["function"] == "r.py:compute_score"
    assert (reward.get("timeout_s"), reward.get("on_error")) == (
        (300.0, "zero") if manager == "prime" else (None, None)
    )
    assert words in project.line(name)
    assert bool(project.line(name)) == bool(words)


def test_names_of_rewards_in_verl_of_today(convert):
    project = convert(
        f"{PPO} {GRPO} reward.num_workers=8 reward.reward_model.enable=True reward.reward_model.model_path=x/reward "
        "reward.reward_model.rollout.name=vllm reward.max_rpm=10 reward.sandbox_fusion.url=http://x "
        "reward.reward_manager.source=importlib reward.reward_manager.module.path=m.py"
    )
    assert project.model["reward_model"] == "x/reward"
    for name in ("reward_model.rollout.name", "max_rpm", "sandbox_fusion.url", "reward_manager.module.path"):
        assert project.line(f"reward.{name}") != "", name
    assert "tokenizer" in project.line("reward_model")
    assert "has no such option" not in "".join(project.left)
    assert counterpart("reward.custom_reward_function.path").option == "rewards"


def test_arguments_of_a_reward_and_the_overlong_buffer(convert):
    project = convert(
        f"{PPO} {GRPO} reward.custom_reward_function.path=r.py +reward.custom_reward_function.reward_kwargs.scale=2 "
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=64 "
        "reward.reward_kwargs.max_resp_len=256"
    )
    reward, penalty = project.loop["rewards"]
    assert reward == {"function": "r.py:compute_score", "arguments": {"scale": 2}}
    assert penalty["function"]["init_args"] == {"max_tokens": 256, "buffer_tokens": 64}
    assert "naive does not read it" in project.line("reward_model.reward_kwargs.overlong_buffer_cfg")


def test_rules_of_a_script_without_a_function(convert):
    reward = convert(f"{PPO} {GRPO} data.train_files=[gsm8k/a.parquet,dapo-math-17k.parquet]").loop["rewards"][0]
    rules = reward["function"]["init_args"]["functions"]
    assert rules["math*"]["init_args"] == {"wrong": -1.0}
    assert convert(f"{PPO} {GRPO}").loop["rewards"] == [{"function": rules["openai/gsm8k"]}]


TEXTS = f"""TP=2
COMMON="algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=x/y \\
    {ROLLOUT}.tensor_model_parallel_size=$TP"
EXTRA+=" data.train_files=['gsm8k.parquet']"
ARGS=(
    trainer.nnodes=3   # of two
    # trainer.nnodes=9
    "data.val_files=['a b.parquet', 'c.parquet']"
)
ARGS+=(trainer.total_epochs=2)
"""


@pytest.mark.parametrize(
    "command", [f'{PPO} $COMMON $EXTRA "${{ARGS[@]}}"', f'CMD="{PPO} $COMMON $EXTRA ${{ARGS[*]}}"\neval "$CMD"']
)
def test_texts_and_arrays_of_options(convert, command):
    project = convert(f"{TEXTS}\necho $COMMON\n{command} trainer.save_freq=5\n")
    assert project.engine["ranks"] == 2
    assert (project.run["num_nodes"], project.run["max_epochs"]) == (3, 2)
    assert project.data["val"] == ["a b.parquet", "c.parquet"]
    assert project.callbacks["RunCheckpoint"]["every_n_steps"] == 5
    assert project.left[-1].startswith("rewards: verl chooses a rule")


def test_a_text_that_is_not_used_is_named(convert):
    project = convert(f'OLD="trainer.nnodes=5 trainer.save_freq=1"\n{PPO} {GRPO}\n')
    assert "num_nodes" not in project.run
    assert "trainer.nnodes, trainer.save_freq" in project.line("OLD")


@pytest.mark.parametrize(
    "end", ["\\\n    # data.seed=9 \\\n    ", "\\\n    \n    ", "\\ \n    ", "# a comment \\\n    "], ids=repr
)
def test_options_that_the_shell_does_not_pass(convert, end):
    project = convert(f"{PPO} {GRPO} {end}trainer.nnodes=3 \\\n    trainer.save_freq=7\n")
    assert (project.run["num_nodes"], project.callbacks["RunCheckpoint"]) == (3, {"every_n_steps": 7})
    assert "ends the command" in project.line("trainer.nnodes, trainer.save_freq")
    assert project.config["seed_everything"] == 42


@pytest.mark.parametrize(
    ("script", "run"),
    [
        ("trainer.experiment_name=a#1 trainer.nnodes=2", {"num_nodes": 2, "default_root_dir": "runs/a#1"}),
        (
            "'trainer.experiment_name=a # b' \\\n  trainer.nnodes=2 \\",
            {"num_nodes": 2, "default_root_dir": "runs/a # b"},
        ),
        ("""trainer.experiment_name='"a b"'""", {"default_root_dir": "runs/a b"}),
        ("trainer.experiment_name='a: b'", {"default_root_dir": "runs/a: b"}),
        ('trainer.nnodes=${N:-2} "+trainer.x=$((4 / 2))"', {"num_nodes": 2}),
        ("++trainer.nnodes=2 trainer.n_gpus_per_node=4", {"num_nodes": 2, "devices": 4}),
        ("trainer.total_training_steps=None trainer.total_epochs=2", {"max_epochs": 2}),
        ("trainer.total_training_steps=50 trainer.total_epochs=2", {"max_steps": 50, "max_epochs": 2}),
        ("trainer.experiment_name=2024-01-01", {"default_root_dir": "runs/2024-01-01"}),
        ("trainer.default_local_dir=12:30", {"default_root_dir": "12:30"}),
    ],
)
def test_words_and_values(convert, script, run):
    project = convert(f"{PPO} {GRPO} {script}\n")
    assert run.items() <= project.run.items()
    assert project.line("trainer.total_training_steps") == ""


def test_defaults_of_empty_variables(convert):
    project = convert(
        f': "${{SIZE:=64}}"\nNODES=${{NODES:-}}\nN=${{NODES:-2}}\n{PPO} {GRPO} trainer.nnodes=$N '
        "data.train_batch_size=$SIZE trainer.save_freq=$NODES trainer.experiment_name=a_${N##*/}\n"
    )
    assert (project.run["num_nodes"], project.data["batch_size"]) == (2, 64)
    assert project.line("trainer.save_freq") == "trainer.save_freq: the script gives it an empty text"
    assert "depends on the machine" in project.line("trainer.experiment_name")


def test_what_a_script_does_not_say_is_named(convert):
    project = convert(
        f'{PPO} --config-path=conf {GRPO} "~trainer.nnodes" $MORE ${{ARGS//a/b}} trainer.save_freq=$1 "$@"\n'
    )
    for word in ("$@", "$MORE", "${ARGS//a/b}", "~trainer.nnodes", "--config-path=conf", "trainer.save_freq"):
        assert project.line(word) != "", word
    assert convert(f"{PPO} --config-name='ppo_trainer.yaml' {GRPO}").line("--config-name='ppo_trainer.yaml'") == ""


def test_of_several_programs_the_last_that_trains_counts(convert):
    sft = SFT.replace("torchrun", "torchrun --nproc_per_node=2")
    project = convert(
        f"{sft} trainer.nnodes=4\n\n{PPO} {GRPO} algorithm.use_kl_in_reward=True trainer.save_freq=3 && "
        f"{PPO} {GRPO} trainer.total_epochs=1 2>&1 | tee log.txt\n"
        "python3 -m verl.trainer.main_eval data.path=out.parquet\npython3 -m verl.model_merger merge --local_dir x\n"
    )
    assert (project.run["max_epochs"], project.callbacks["RunCheckpoint"]) == (1, {})
    assert "kl_reward" not in project.model
    assert "num_nodes" not in project.run
    assert "verl.trainer.fsdp_sft_trainer, verl.trainer.main_ppo: these are not read" in project.left[0]


def test_a_function_that_starts_the_program(convert):
    function = f'run () {{\n  {PPO} {GRPO} "$@"\n}}\nrun trainer.nnodes=2\n'
    assert convert(function).run["num_nodes"] == 2
    twice = convert(f"{function}run trainer.total_epochs=3\n")
    assert (twice.run["max_epochs"], twice.run.get("num_nodes")) == (3, None)
    assert twice.line("run").startswith("run: these are not read, but only run, the last program")


def test_arguments_of_the_script_do_not_replace_its_defaults(convert):
    arguments = "while [[ $# -gt 0 ]]; do case $1 in\n --nodes) N=$2; shift 2 ;;\n --seed) SEED=$2 ;;\nesac; done\n"
    project = convert(f"N=2\n{arguments}SIZE=$(expr $N \\* 32)\n{PPO} {GRPO} trainer.nnodes=$N "
                      "data.train_batch_size=$SIZE data.seed=$SEED")  # fmt: skip
    assert (project.run["num_nodes"], project.data["batch_size"]) == (2, 64)
    assert "depends on the machine" in project.line("data.seed")


def test_words_that_are_no_options_are_named(convert):
    project = convert(f"{PPO} mine.yaml {GRPO} data.val_files=[a.parquet, b.parquet] > out.txt 2> $LOG\n")
    assert project.line("mine.yaml") == "mine.yaml: no option, and not read"
    assert project.line("b.parquet]") == "b.parquet]: no option, and not read"
    assert not project.line("out.txt")
    assert not project.line("$LOG")


def test_a_script_that_only_generates_is_an_error(tmp_path, capsys):
    (tmp_path / "run.sh").write_text("python -m verl.trainer.main_generation_server actor_rollout_ref.model.path=x/y\n")
    assert new.run([str(tmp_path / "run"), "--from-verl", str(tmp_path / "run.sh")]) == 2
    assert "starts verl.trainer.main_generation_server, which does not train" in capsys.readouterr().err


CHOICES = f"""BACKEND=${{BACKEND:-fsdp}}
case "${{DEVICE}}" in
    cpu | gpu) NODES=2 ;;
    npu)
        NODES=8
        ;;
esac
if [ "$BACKEND" = megatron ] && [ $NODES -gt 1 ]; then
    NODES=16
elif [[ $BACKEND == fsdp* ]]; then
    if [ -n "" ]; then NODES=32; fi
    EPOCHS=4
else
    EPOCHS=5
fi
{PPO} {GRPO} trainer.nnodes=$NODES trainer.total_epochs=$EPOCHS
"""


def test_known_conditions_are_decided(convert):
    project = convert(CHOICES)
    assert (project.run["num_nodes"], project.run["max_epochs"]) == (2, 4)
    assert project.line("the script has conditions") == ""
    unknown = convert(CHOICES.replace("BACKEND=${BACKEND:-fsdp}", "BACKEND=$(cat file)"))
    assert (unknown.run["num_nodes"], unknown.run["max_epochs"]) == (16, 5)
    assert unknown.line("the script has conditions").endswith("are read, and the last one counts")


def test_a_quote_without_end_hides_one_line_only(convert):
    assert convert(f"echo it's late\n{PPO} {GRPO} trainer.nnodes=2\n").run["num_nodes"] == 2


def test_mappings_of_hydra_are_options(convert):
    project = convert(
        f"{PPO} {GRPO} 'data.apply_chat_template_kwargs={{enable_thinking:False,effort:low}}' "
        f"+{ROLLOUT}.engine_kwargs.vllm={{disable_mm_preprocessor_cache:True}}"
    )
    assert project.data["chat_template_kwargs"] == {"enable_thinking": False, "effort": "low"}
    assert project.line(f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache") != ""


def test_false_is_not_silent(convert):
    project = convert(
        f"{PPO} {GRPO} {ACTOR}.policy_loss.loss_mode=gspo algorithm.norm_adv_by_std_in_grpo=False "
        f"{ACTOR}.fsdp_config.reshard_after_forward=False +data.apply_chat_template_kwargs.enable_thinking=False "
        f"{ACTOR}.freeze_vision_tower=False actor_rollout_ref.model.enable_gradient_checkpointing=False"
    )
    assert project.model["advantages"]["init_args"] == {"normalize_std": False}
    assert project.data["chat_template_kwargs"] == {"enable_thinking": False}
    assert project.run["strategy"]["init_args"] == {"reshard_after_forward": False}
    assert project.model["actor"]["init_args"] == {"path": "x/y", "train_vision": True}


@pytest.mark.parametrize(
    ("options", "loss", "arguments", "aggregation"),
    [
        ("algorithm.adv_estimator=rloo", "ClippedPolicyLoss", {"clip_range_low": 0.2, "dual_clip": 3.0}, "TokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_low=3e-4", "GSPOLoss",
         {"clip_range_low": 3e-4, "clip_range_high": 0.2}, "SequenceMeanTokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean", "GSPOLoss", {}, "TokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.tau_neg=1.1", "SAPOLoss", {"tau_pos": 1.0, "tau_neg": 1.1},
         "SequenceMeanTokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10", "CISPOLoss",
         {"clip_range_low": 1.0, "clip_range_high": 0.2}, "TokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", "ClipCovLoss", {"covariance_high": 5.0}, "TokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", "KLCovLoss", {"kl_coef": 0.1}, "TokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=dppo_tv {ACTOR}.clip_ratio_c=20", "DPPOTotalVariationLoss",
         {"ratio_cap": 20.0}, "TokenMean"),
        (f"{ACTOR}.policy_loss.loss_mode=gpg algorithm.adv_estimator=gpg", "ReinforceLoss", {}, "TokenMean"),
    ],
)  # fmt: skip
def test_losses(convert, options, loss, arguments, aggregation):
    project = convert(f"{PPO} {GRPO} {options}")
    policy_loss = project.model["policy_loss"]
    assert policy_loss["class_path"].rpartition(".")[2] == loss
    assert arguments.items() <= policy_loss.get("init_args", {}).items()
    assert project.model["aggregation"]["class_path"].rpartition(".")[2] == aggregation
    assert [line for line in project.left if ACTOR in line] == []
    assert bool(project.line("loss_agg_mode")) == (loss == "GSPOLoss" and aggregation != "TokenMean")


def test_advantages_of_estimators(convert):
    def advantages(estimator, more=""):
        project = convert(f"{PPO} {GRPO} algorithm.adv_estimator={estimator} {more}")
        assert project.line("algorithm.adv_estimator") == ""
        return project.model.get("advantages", {})

    baseline = advantages("reinforce_plus_plus_baseline")["class_path"]
    assert baseline.endswith(".ReinforcePlusPlusBaseline")
    assert advantages("reinforce_plus_plus", "algorithm.gamma=0.9")["init_args"] == {"gamma": 0.9}
    assert advantages("optimal_token_baseline")["class_path"].endswith(".OptimalTokenBaseline")
    assert advantages("rloo_vectorized") == {}


@pytest.mark.parametrize(
    ("name", "value", "place", "expected"),
    [
        (f"{ACTOR}.kl_loss_type", "low_var_kl+", "kl_loss", {"coef": 0.001, "estimator": "k3+"}),
        (f"{ACTOR}.optim.betas", "[0.9,0.95]", "optimizer", {"lr": 1e-6, "weight_decay": 0.01, "betas": [0.9, 0.95]}),
        (f"{ACTOR}.optim.clip_grad", "0.5", "max_grad_norm", 0.5),
        ("algorithm.rollout_correction.rollout_is", "token", "correction", {"level": "token"}),
    ],
)
def test_values_of_the_module(convert, name, value, place, expected):
    project = convert(f"{PPO} {GRPO} {ACTOR}.use_kl_loss=True {name}={value}")
    assert project.model[place] == expected
    assert project.line(name) == ""


def test_schedules(convert):
    steps = f"{PPO} {GRPO} {ACTOR}.optim.lr_warmup_steps=10"
    assert (
        convert(f"{steps} trainer.total_training_steps=100").model["lr_scheduler"]["init_args"]["warmup_ratio"] == 0.1
    )
    assert "fraction of the run" in convert(steps).line(f"{ACTOR}.optim.lr_warmup_steps")
    assert convert(f"{PPO} {GRPO} {ACTOR}.optim.lr_scheduler_type=wsd").line(f"{ACTOR}.optim.lr_scheduler_type") != ""
    assert convert(f"{PPO} {GRPO} {ACTOR}.kl_loss_type=full").line(f"{ACTOR}.kl_loss_type") != ""


def test_loggers(convert):
    project = convert(f"{PPO} {GRPO} trainer.logger=['console','wandb','mlflow','swanlab'] trainer.project_name=p")
    wandb, mlflow = project.run["logger"]
    assert wandb["init_args"] == {"project": "p", "name": "verl"}
    assert mlflow["init_args"] == {"experiment_name": "p", "run_name": "verl"}
    assert "without swanlab" in project.line("trainer.logger")
    assert "logger" not in convert(f"{PPO} {GRPO} trainer.logger=[console,tensorboard]").run


def test_images_adapters_and_further_names_of_the_model(convert):
    project = convert(
        f"{PPO} {GRPO} data.image_key=pictures {ACTOR}.freeze_vision_tower=True "
        "actor_rollout_ref.model.tokenizer_path=x/tokenizer"
    )
    assert (project.model["actor"], project.data["columns"]) == ("x/y", {"images": "pictures"})
    assert project.data["tokenizer"] == "x/tokenizer"
    model = "actor_rollout_ref.model"
    project = convert(
        f"{PPO} {GRPO} {model}.lora_rank=8 {model}.target_modules=[q_proj] {model}.exclude_modules=.*visual.*"
    )
    lora = {"alpha": 16, "rank": 8, "target_modules": ["q_proj"]}
    assert project.model["actor"]["init_args"]["lora"] == lora
    assert project.line(f"{model}.exclude_modules") != ""  # a regular expression
    adapter = convert(f"{PPO} {GRPO} {model}.lora_rank=8 {model}.lora_adapter_path=x/lora").model["actor"]["init_args"]
    assert adapter == {"path": "x/y", "adapter": "x/lora"}


def test_an_asynchronous_run_has_the_batch_of_an_update(convert):
    project = convert(
        f"python -m verl.experimental.fully_async_policy.fully_async_main {GRPO} data.train_batch_size=0 "
        f"data.gen_batch_size=1 {ACTOR}.ppo_mini_batch_size=32 async_training.require_batches=4 "
        "algorithm.filter_groups.enable=True async_training.staleness_threshold=0.5"
    )
    assert project.data["batch_size"] == 256
    assert project.loop["dynamic_sampling"] == {"prompts_per_step": 128}
    assert "128 prompts" in project.line("data.train_batch_size")
    assert "max_staleness" in project.line("async_training.staleness_threshold")


def test_a_reward_file_in_an_unknown_folder(convert):
    project = convert(f"{PPO} {GRPO} custom_reward_function.path=$WORK/mine.py custom_reward_function.name=score")
    assert project.loop["rewards"] == [{"function": "mine.py:score"}]
    assert "depends on the machine" in project.line("custom_reward_function.path")
