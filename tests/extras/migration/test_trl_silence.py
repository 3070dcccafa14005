"""``new --from-trl`` loses no option without a line that names it, and TRL's own defaults change nothing."""

import json
from contextlib import suppress

import pytest
import yaml

from lightning_rlhf.extras.commands import new
from lightning_rlhf.extras.migration.parts import table, trl_defaults, trl_optimizers
from lightning_rlhf.extras.migration.trl import SECTIONS_OF, converted, counterpart, defaults_of
from lightning_rlhf.extras.schema.check import mistakes

BASE = {"model_name_or_path": "x/y", "dataset_name": "o/r", "max_steps": 100}
ONLINE = {**BASE, "reward_funcs": ["right"], "max_prompt_length": 512}


class Converted:
    """A project of ``new --from-trl``: parts of its configuration, and the lines about what was not carried over."""

    def __init__(self, directory, output):
        self.config = yaml.safe_load((directory / "run.yaml").read_text())
        self.model, self.data = (self.config[part]["init_args"] for part in ("model", "data"))
        self.run = self.config["trainer"]
        self.callbacks = {each["class_path"].rpartition(".")[2]: each["init_args"] for each in self.run["callbacks"]}
        text = output.partition("not carried over:\n")[2].partition("\n\n")[0]
        self.left = [line.strip() for line in text.splitlines()]

    def line(self, name):
        """The line about an option; empty without one."""
        return next((line for line in self.left if line.startswith(f"{name}: ")), "")


@pytest.fixture
def convert(tmp_path, capsys):
    numbers = iter(range(10_000))

    def convert(options, trainer="grpo", *arguments):
        number = next(numbers)
        file = tmp_path / f"given{number}.{'yaml' if isinstance(options, str) else 'json'}"
        file.write_text(options if isinstance(options, str) else json.dumps(options))
        directory = tmp_path / f"run{number}"
        code = new.run([str(directory), "--from-trl", str(file), "--trainer", trainer, *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return Converted(directory, captured.out)

    return convert


def fits(converted, tmp_path):
    """Whether the command line has nothing against a configuration."""
    (tmp_path / "checked.yaml").write_text(yaml.safe_dump(converted.config))
    return mistakes([f"--config={tmp_path / 'checked.yaml'}"], "") == {}


def test_a_list_of_loggers(convert, tmp_path):
    project = convert({**BASE, "report_to": ["tensorboard", "wandb"], "run_name": "mine"}, "sft")
    tensorboard, wandb = project.run["logger"]
    assert tensorboard["class_path"].endswith("TensorBoardLogger")
    assert wandb == {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"name": "mine"}}
    assert project.left == []
    assert fits(project, tmp_path)
    project = convert({**BASE, "report_to": ["comet_ml", "mlflow"]}, "sft")
    assert project.run["logger"]["class_path"].endswith("MLFlowLogger")
    assert "comet_ml" in project.line("report_to")
    assert "logger" not in convert({**BASE, "report_to": "tensorboard"}, "sft").run  # the default here
    assert "all" in convert({**BASE, "report_to": "all"}, "sft").line("report_to")


DEFAULTS = trl_defaults()
# Sections whose options a trainer has all of.
OF_TRAINER = {
    trainer: {sections[0], "TrainingArguments", "ModelConfig", "ScriptArguments"}
    for trainer, sections in SECTIONS_OF.items()
}
OFF = {"packing": False, "push_to_hub": False, "use_peft": False, "load_in_4bit": False, "top_k": None}


@pytest.mark.parametrize("trainer", SECTIONS_OF)
def test_defaults_of_trl_change_nothing(convert, trainer):
    options = {name: value for section in reversed(SECTIONS_OF[trainer]) if section in OF_TRAINER[trainer]
               for name, value in DEFAULTS.get(section, {}).items()}  # fmt: skip
    base = ONLINE if trainer in ("grpo", "rloo") else BASE
    project, plain = convert({**options, **OFF, **base}, trainer), convert(base, trainer)
    assert project.config == plain.config
    assert project.left == plain.left


def test_options_of_vllm_count_with_use_vllm_only(convert):
    given = {**ONLINE, "vllm_gpu_memory_utilization": 0.5, "vllm_mode": "server", "vllm_max_model_length": 9}
    project = convert({**given, "use_vllm": False})
    assert "engine" not in project.callbacks["RolloutLoop"]
    assert [line.partition(":")[0] for line in project.left] == [name for name in given if name.startswith("vllm_")]
    assert "use_vllm" in project.line("vllm_gpu_memory_utilization")
    project = convert({**ONLINE, "use_vllm": True})
    engine = project.callbacks["RolloutLoop"]["engine"]
    assert engine["class_path"].endswith(".VLLMEngine")
    assert engine["init_args"] == {"gpu_memory_utilization": 0.3}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {"urls": "http://127.0.0.1:8000"}),
        ({"vllm_server_host": "10.0.0.2", "vllm_server_port": 9}, {"urls": "http://10.0.0.2:9"}),
        ({"vllm_server_base_url": "http://a:1", "vllm_server_timeout": 900},
         {"urls": "http://a:1", "timeout": 900.0}),
    ],
)  # fmt: skip
def test_server_of_vllm(convert, tmp_path, options, arguments):
    project = convert({**ONLINE, "use_vllm": True, "vllm_mode": "server", **options})
    engine = project.callbacks["RolloutLoop"]["engine"]
    assert engine["class_path"].endswith(".VLLMServerEngine")
    assert engine["init_args"] == arguments
    assert [line.partition(":")[0] for line in project.left] == ["vllm_mode"]  # its server is another program
    assert fits(project, tmp_path)


@pytest.mark.parametrize(
    ("name", "path", "further"),
    [
        ("adamw_torch_fused", None, {"betas": [0.9, 0.999], "eps": 1e-8}),
        ("adamw_torch_8bit", "torchao.optim.AdamW8bit", {"betas": [0.9, 0.999], "eps": 1e-8}),
        ("adamw_bnb_8bit", "bitsandbytes.optim.AdamW8bit", {"betas": [0.9, 0.999], "eps": 1e-8}),
        ("paged_adamw_32bit", "bitsandbytes.optim.PagedAdamW32bit", {"betas": [0.9, 0.999], "eps": 1e-8}),
        ("paged_lion_8bit", "bitsandbytes.optim.PagedLion8bit", {"betas": [0.9, 0.999]}),
        ("sgd", "torch.optim.SGD", {}),
        ("adafactor", "transformers.Adafactor", {"scale_parameter": False, "relative_step": False}),
    ],
)
def test_optimizers(convert, tmp_path, name, path, further):
    project = convert({**BASE, "optim": name, "learning_rate": 1e-4, "weight_decay": 0.1}, "sft")
    optimizer = project.model["optimizer"]
    assert optimizer.get("class_path") == path
    assert optimizer.get("init_args", optimizer) == {"lr": 1e-4, "weight_decay": 0.1, **further}
    assert project.left == []
    assert fits(project, tmp_path)


@pytest.mark.parametrize("entry", trl_optimizers().values(), ids=list(trl_optimizers()))
def test_optimizers_take_their_arguments(entry):
    import torch

    room, _, name = entry.get("class_path", "torch.optim.AdamW").rpartition(".")
    module = pytest.importorskip(room)
    arguments = {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, **entry.get("init_args", {})}
    for unread in entry.get("without", ()):
        del arguments[unread]
    getattr(module, name)([torch.nn.Parameter(torch.zeros(2, 2))], **arguments)


def test_an_optimizer_that_is_not_here_is_listed(convert):
    project = convert({**BASE, "optim": "galore_adamw", "optim_args": "rank=8"}, "sft")
    assert "AdamW" in project.line("optim")
    assert project.line("optim_args")


@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_of_the_model(convert, as_text):
    kwargs = {"torch_dtype": "bfloat16", "attn_implementation": "sdpa", "revision": "abc", "device_map": "auto"}
    value = json.dumps(kwargs) if as_text else kwargs
    project = convert({**BASE, "use_peft": True, "model_init_kwargs": value}, "sft")
    source = project.model["actor"]["init_args"]
    assert (source["dtype"], source["attn_implementation"], source["revision"]) == ("bfloat16", "sdpa", "abc")
    assert [line.partition(" (")[0] for line in project.left] == ["model_init_kwargs: {'device_map': 'auto'}"]


def test_mappings_in_json(convert, tmp_path, capsys):
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'}
    project = convert({**BASE, **schedule}, "sft")
    assert project.model["lr_scheduler"]["init_args"]["arguments"] == {"min_lr_rate": 0.1}
    template = "{{ messages }}"  # no JSON
    assert template in convert({**BASE, "chat_template": template}, "sft").line("chat_template")
    (tmp_path / "wrong.json").write_text(json.dumps({**BASE, "lr_scheduler_kwargs": "{min"}))
    assert new.run([str(tmp_path / "wrong"), "--from-trl", str(tmp_path / "wrong.json"), "--trainer", "sft"]) == 2
    assert "lr_scheduler_kwargs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"torch_dtype": "float16", "use_peft": True}, "torch_dtype: 'float16'"),
        ({"dtype": "auto"}, "dtype: auto"),
        ({"torch_dtype": "bfloat16"}, "torch_dtype: bfloat16"),
        ({"attn_implementation": "kernels-community/flash-attn2"}, "attn_implementation: 'kernels-community"),
    ],
)
def test_types_and_attention_that_are_not_here(convert, tmp_path, given, line):
    project = convert({**BASE, **given}, "sft")
    assert any(each.startswith(line) for each in project.left), project.left
    assert fits(project, tmp_path)


def test_no_of_yaml_is_no_truth_value(convert):
    text = yaml.safe_dump(BASE) + "eval_strategy: no\nsave_strategy: no\nlogging_strategy: no\nsave_steps: 7\n"
    project = convert(text, "sft")
    assert "val" not in project.data
    assert [line.partition(" (")[0] for line in project.left] == ["save_strategy: 'no'", "logging_strategy: 'no'"]
    assert "every_n_steps" not in project.callbacks["RunCheckpoint"]
    assert "Console" not in project.callbacks


def test_validation_is_that_of_trl(convert):
    project = convert({**BASE, "eval_steps": 5, "per_device_eval_batch_size": 2}, "sft")
    assert "val" not in project.data
    assert "val_check_interval" not in project.run
    assert "eval_strategy" in project.line("eval_steps")
    assert "eval_strategy" in project.line("per_device_eval_batch_size")
    for name in ("eval_strategy", "evaluation_strategy"):
        project = convert({**BASE, name: "steps", "logging_steps": 20, "dataset_test_split": "held_out"}, "sft")
        assert project.run["val_check_interval"] == 20  # eval_steps are logging_steps by default
        assert project.data["val"]["init_args"] == {"path": "o/r", "split": "held_out"}
        assert project.left == []


def test_columns_of_prompt_and_text(convert):
    project = convert({**BASE, "dataset_prompt_column": "question", "dataset_text_field": "body"}, "sft")
    assert project.data["columns"] == {"prompt": "question", "text": "body"}
    assert convert({**BASE, "dataset_text_field": "body"}, "dpo").line("dataset_text_field")


def test_one_reward_is_no_list(convert):
    project = convert({**ONLINE, "reward_funcs": "accuracy_reward", "reward_weights": 0.5})
    rewards = project.callbacks["RolloutLoop"]["rewards"]
    assert rewards == [{"function": "trl.rewards.accuracy_reward", "messages": True, "weight": 0.5}]


def test_rewards_beside_a_reward_model(convert, tmp_path):
    given = {**ONLINE, "reward_model_name_or_path": "x/reward", "reward_funcs": ["get_soft_overlong_punishment"]}
    project = convert({**given, "reward_weights": [2.0, 0.5]})
    (reward,) = project.callbacks["RolloutLoop"]["rewards"]
    assert reward["function"]["init_args"] == {"max_tokens": 1280, "buffer_tokens": 256}
    assert (reward["weight"], project.model["reward_model"]) == (0.5, "x/reward")
    assert project.line("reward_weights")
    assert fits(project, tmp_path)
    assert convert({**given, "reward_weights": [1.0, 0.5]}).left == []


def test_an_unknown_schedule_takes_its_warmup_along(convert):
    project = convert({**BASE, "lr_scheduler_type": "greedy", "warmup_ratio": 0.1}, "sft")
    assert "lr_scheduler" not in project.model
    assert project.line("lr_scheduler_type")
    assert project.line("warmup_ratio")


def test_order_of_rows(convert):
    assert "shuffle" not in convert({**BASE, "shuffle_dataset": False}, "sft").data  # its sampler is random
    project = convert({**ONLINE, "shuffle_dataset": True})
    assert (project.left, project.data.get("shuffle")) == ([], None)
    assert convert({**ONLINE, "shuffle_dataset": False}).data["shuffle"] is False
    assert convert({**BASE, "train_sampling_strategy": "sequential"}, "sft").data["shuffle"] is False
    project = convert({**BASE, "train_sampling_strategy": "sequential", "shuffle_dataset": True}, "sft")
    assert (project.data.get("shuffle"), project.left) == (None, [])
    assert convert({**BASE, "train_sampling_strategy": "group_by_length"}, "sft").line("train_sampling_strategy")
    assert convert({**BASE, "group_by_length": True}, "sft").line("group_by_length")


def test_files_and_mixtures(convert, tmp_path):
    entries = [
        {"path": "json", "data_files": ["a.jsonl", "b.jsonl"]},
        {"path": "o/r", "name": "math", "split": "train[:10%]", "columns": ["prompt"]},
        {"path": "o/q", "data_files": "c.parquet"},
    ]
    given = {"model_name_or_path": "x/y", "datasets": entries, "eval_strategy": "epoch", "test_split_size": 0.1}
    project = convert(given, "sft")
    first, second, hub, remote = project.data["train"]
    assert (first, second, remote) == ("a.jsonl", "b.jsonl", "hf://datasets/o/q/c.parquet")
    assert hub["init_args"] == {"path": "o/r", "split": "train[:10%]", "name": "math"}
    assert [line.partition(":")[0] for line in project.left] == ["datasets", "eval_strategy", "test_split_size"]
    assert fits(project, tmp_path)
    files = {"train": "a.jsonl", "test": "b.jsonl"}
    project = convert({**BASE, "dataset_name": "json", "data_files": files, "eval_strategy": "epoch"}, "sft")
    assert (project.data["train"], project.data["val"], project.left) == ("a.jsonl", "b.jsonl", [])
    project = convert({**BASE, "data_files": "a.jsonl", "dataset_train_split": "train[:10%]"}, "sft")
    assert (project.data["train"], bool(project.line("train[:10%]"))) == ("hf://datasets/o/r/a.jsonl", True)


@pytest.mark.parametrize(
    "entry", [{"split": "train"}, "o/r", {"path": "json", "data_files": {"test": "a.jsonl"}, "split": "train"}]
)
def test_a_data_set_without_a_path_is_an_error(tmp_path, capsys, entry):
    (tmp_path / "given.json").write_text(json.dumps({"datasets": [entry], "packing": True}))
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.json")]) == 2
    assert "datasets" in capsys.readouterr().err


def test_a_trainer_of_another_kind_is_named(convert):
    project = convert({**BASE, "num_generations": 8, "reward_funcs": ["right"]}, "sft")
    assert "grpo" in project.line("num_generations")
    assert "grpo" in project.line("reward_funcs")
    assert "sft" in convert({**ONLINE, "packing": True}).line("packing")
    assert convert({**ONLINE, "num_generations": 4}, "rloo").left == []


def test_options_of_dpo_do_not_show_grpo(tmp_path, capsys):
    given = {**BASE, "beta": 0.1, "max_completion_length": 512}  # of releases whose DPO had that option
    (tmp_path / "given.json").write_text(json.dumps(given))
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.json")]) == 2
    assert "add --trainer" in capsys.readouterr().err


def test_two_sizes_of_a_generation(convert):
    sizes = {**ONLINE, "per_device_train_batch_size": 4, "steps_per_generation": 2, "num_generations": 4}
    project = convert({**sizes, "generation_batch_size": 64})
    assert "steps_per_generation" in project.line("generation_batch_size")
    assert project.data["batch_size"] == 16
    project = convert({**sizes, "generation_batch_size": 64}, "grpo", "--devices", "8")  # as in a saved configuration
    assert (project.left, project.data["batch_size"]) == ([], 16)


def test_null_is_no_default(convert):
    project = convert({**ONLINE, "use_vllm": True, "vllm_importance_sampling_clip_max": None})
    assert project.model["correction"]["init_args"]["upper"] == float("inf")
    assert convert({**ONLINE, "shuffle_dataset": None}).data["shuffle"] is False
    assert convert({**ONLINE, "max_grad_norm": None}).model["max_grad_norm"] is None
    assert convert(ONLINE).model["max_grad_norm"] == 1.0


def test_parts_of_fsdp(convert):
    project = convert({**BASE, "fsdp": "full_shard auto_wrap"}, "sft", "--devices", "2")
    assert (project.run["strategy"]["class_path"].rpartition(".")[2], project.left) == ("RLHFFSDPStrategy", [])
    for value in ("full_shard auto_wrap offload", ["shard_grad_op"]):
        assert convert({**BASE, "fsdp": value}, "sft", "--devices", "2").line("fsdp")


def test_losses_take_their_options_only(convert, tmp_path):
    project = convert({**BASE, "loss_type": "hinge", "label_smoothing": 0.1}, "dpo")
    assert project.line("label_smoothing")
    assert fits(project, tmp_path)
    assert convert({**ONLINE, "importance_sampling_level": "word"}).line("importance_sampling_level")
    project = convert({**BASE, "precompute_ref_log_probs": True}, "kto")
    assert project.line("precompute_ref_log_probs")
    assert "ref" not in project.model


def test_a_secret_is_written_nowhere(convert, tmp_path):
    convert({**BASE, "hub_token": "hf_secret"}, "sft")
    assert not [file for file in tmp_path.glob("run*/*") if "hf_secret" in file.read_text()]


def test_processes_and_environment_of_a_file(convert):
    project = convert({**BASE, "num_processes": 4, "env": {"A": "1"}}, "sft", "--devices", "4")
    assert [line.partition(":")[0] for line in project.left] == ["env"]
    assert "--devices" in convert({**BASE, "num_processes": 4}, "sft").line("num_processes")


def test_an_unknown_option_is_listed_whatever_its_value(convert):
    assert convert({**BASE, "shufle_dataset": False}, "sft").line("shufle_dataset")


# A base beside which each option counts that TRL reads only beside others.
RICH = {
    "use_peft": True, "use_vllm": True, "vllm_importance_sampling_clip_max": 2.0, "eval_strategy": "steps",
    "eval_steps": 5, "warmup_steps": 5, "report_to": ["wandb"], "lr_scheduler_type": "cosine", "beta": 0.3,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
# Those that have no effect in TRL beside this base, or without any; the last one is as packing, the default here.
NO_EFFECT = {
    "num_train_epochs",
    "warmup_ratio",
    "evaluation_strategy",
    "lora_dropout",
    "shuffle_dataset",
    "padding_free",
}
WORDS = {
    "truncation_mode": "keep_end", "vllm_mode": "server", "train_sampling_strategy": "group_by_length",
    "scale_rewards": "none",
}  # fmt: skip


def probes(name, usual):
    """Values that an option with this default, or none, could have."""
    if isinstance(usual, bool):
        return [not usual]
    if isinstance(usual, int | float):
        return [usual + 3]
    if isinstance(usual, str):
        return [WORDS.get(name, "word")]
    return [["word"], "word", *([] if usual else [True, 3, 0.25, {"word": 1}])]


@pytest.mark.parametrize("trainer", SECTIONS_OF)
def test_no_option_is_lost_in_silence(trainer):
    """Whatever changes nothing has a line or is an error, or the table says that it needs nothing."""
    base = {**BASE, **RICH}
    if trainer in ("grpo", "rloo"):
        base |= {**ONLINE, "reward_weights": [0.5]}
    plain, _ = converted(base, trainer, 2)
    names = {name for section in SECTIONS_OF[trainer] for name in table("trl").get(section, ())}
    lost = []
    for name in sorted(names - NO_EFFECT):
        entry = counterpart(trainer, name)
        for value in probes(name, base.get(name, defaults_of(trainer).get(name))):
            with suppress(ValueError, TypeError, AttributeError, ArithmeticError):  # one line for the user
                config, left = converted({**base, name: value}, trainer, 2)
                has_line = any(name in line for line in left)
                if config == plain and not has_line and (entry.option or entry.is_missing):
                    lost.append((name, value))
    assert lost == []


def test_quantized_weights_without_adapters_are_named(convert):
    project = convert({**BASE, "load_in_4bit": True}, "sft")
    assert project.model["actor"]["init_args"]["lora"]
    assert "adapters are trained" in project.line("load_in_4bit")
    assert not convert({**BASE, "load_in_4bit": True, "use_peft": True}, "sft").line("load_in_4bit")


@pytest.mark.parametrize(("text", "is_verl"), [("python -m verl.trainer.main_ppo", True), ("overlong_reward()", False)])
def test_programs_are_told_which_option_reads_them(tmp_path, capsys, text, is_verl):
    (tmp_path / "train.sh").write_text(text)
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "train.sh")]) == 2
    assert ("use --from-verl" in capsys.readouterr().err) == is_verl


@pytest.mark.parametrize(("further", "is_doubtful"), [({}, True), ({"loss_type": "dapo"}, False)])
def test_options_of_grpo_and_rloo_alike_name_the_other(tmp_path, capsys, further, is_doubtful):
    (tmp_path / "given.json").write_text(json.dumps({**ONLINE, "num_generations": 4, **further}))
    assert new.run([str(tmp_path / "run"), "--from-trl", str(tmp_path / "given.json")]) == 0
    assert ("--trainer rloo is the other" in capsys.readouterr().out) == is_doubtful


def test_pairs_that_are_too_long_for_a_reward_model_are_left_out(convert):
    project = convert({**BASE, "max_length": 256}, "reward")
    assert (project.data["max_tokens"], project.data["too_long"]) == (256, "drop")


def test_no_loggers_in_yaml(convert):
    assert "logger" not in convert(yaml.safe_dump(BASE) + "report_to: no\n", "sft").run


def test_a_loss_over_all_tokens_is_listed(convert):
    project = convert({**BASE, "completion_only_loss": False, "assistant_only_loss": True}, "sft")
    assert [line.partition(":")[0] for line in project.left] == ["completion_only_loss"]


def test_rewards_of_trl_by_their_full_name_get_messages(convert):
    (reward,) = convert({**ONLINE, "reward_funcs": ["trl.rewards.accuracy_reward"]}).callbacks["RolloutLoop"]["rewards"]
    assert reward == {"function": "trl.rewards.accuracy_reward", "messages": True, "weight": 1.0}
