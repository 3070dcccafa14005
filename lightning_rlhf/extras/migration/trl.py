"""A configuration from the options of a trainer of TRL, and the options that could not be carried over."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.given import GivenOptions
from lightning_rlhf.extras.migration.parts import Counterpart, table, vllm_engine
from lightning_rlhf.extras.migration.trl_losses import PAIRED, grpo_loss
from lightning_rlhf.extras.schema.known import schedules

# Sections of the table in which the options of a trainer are looked up, its own first.
_COMMON = ("ModelConfig", "ScriptArguments", "TrainingArguments", "Earlier and further names")
SECTIONS_OF = {
    "sft": ("SFTConfig", *_COMMON),
    "dpo": ("DPOConfig", "SFTConfig", *_COMMON),
    "kto": ("KTOConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "reward": ("RewardConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "orpo": ("ORPOConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "cpo": ("CPOConfig", "ORPOConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "rloo": ("RLOOConfig", "GRPOConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "grpo": ("GRPOConfig", "DPOConfig", "SFTConfig", *_COMMON),
}
# Options by which a file without the name of its trainer is recognised: the first match decides. ORPO has none.
_MARKS = {
    "kto": {"desirable_weight", "undesirable_weight"},
    "cpo": {"cpo_alpha", "simpo_gamma"},
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "grpo": {"num_generations", "max_completion_length", "reward_funcs"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "discopop_tau"},
    "sft": {"max_seq_length", "packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"},
}
# Defaults of TRL 1.16 that decide what a run learns; ours differ from some of them.
_ALL = {
    "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "lr_scheduler_type": "linear", "max_grad_norm": 1.0,
    "gradient_checkpointing": True, "bf16": True,
}  # fmt: skip
_DROPOUT = 0.05  # of adapters
_ANY_LENGTH = 32_768  # longest text of a run without a limit
_ONLINE = {"max_completion_length": 512, "temperature": 1.0, "num_iterations": 1, "epsilon": 0.2}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {**_ALL, "learning_rate": 2e-5, "max_length": 1024},
    "dpo": {**_ALL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "kto": {**_ALL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "reward": {**_ALL, "learning_rate": 1e-4, "max_length": 1024},
    "orpo": {**_ALL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "cpo": {**_ALL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    "rloo": {**_ALL, **_ONLINE, "learning_rate": 1e-6, "num_generations": 2, "beta": 0.05},
    "grpo": {**_ALL, **_ONLINE, "learning_rate": 1e-6, "num_generations": 8, "beta": 0.0, "loss_type": "dapo"},
}  # fmt: skip
_MODULES = {
    "sft": ("SFTModule", "ConversationDataModule"), "dpo": ("DPOModule", "PreferenceDataModule"),
    "kto": ("KTOModule", "UnpairedDataModule"), "reward": ("RewardModule", "PreferenceDataModule"),
    "orpo": ("DPOModule", "PreferenceDataModule"), "cpo": ("DPOModule", "PreferenceDataModule"),
    "rloo": ("RLOOModule", "PromptDataModule"), "grpo": ("GRPOModule", "PromptDataModule"),
}  # fmt: skip
_OPTIMIZERS = {
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit", "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
}  # fmt: skip
_STRATEGIES = {
    "single": "lightning_rlhf.strategies.single.RLHFSingleDeviceStrategy",
    "ddp": "lightning_rlhf.strategies.ddp.RLHFDDPStrategy",
    "fsdp": "lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy",
}
_LOGGERS = {
    "wandb": "lightning.pytorch.loggers.WandbLogger",
    "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
    "trackio": "lightning_rlhf.extras.loggers.trackio.TrackioLogger",
}
_NO_MODEL = "set the model"
_LORA: dict[str, str] = {
    "rank": "lora_r", "alpha": "lora_alpha", "target_modules": "lora_target_modules", "rslora": "use_rslora",
    "dora": "use_dora",
}  # fmt: skip
_ENGINE: dict[str, str] = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization", "tensor_parallel_size": "vllm_tensor_parallel_size",
    "sleep_while_learning": "vllm_enable_sleep_mode",
}  # fmt: skip
_LOGGER_ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "wandb": {"name": ("run_name",), "project": ("project", "wandb_project"), "entity": ("wandb_entity",)},
    "mlflow": {"run_name": ("run_name",), "experiment_name": ("project",)},
    "trackio": {"project": ("project",)},
}
_TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # take lists of messages
_STRATEGIES_OF_STEPS = ("save_strategy", "logging_strategy")


def counterpart(trainer: str, option: str) -> Counterpart | None:
    """Return what an option of a trainer of TRL is here; None for an unknown option."""
    sections = (table("trl").get(section, {}) for section in SECTIONS_OF[trainer])
    return next((options[option] for options in sections if option in options), None)


def read_options(file: Path) -> dict[str, Any]:
    """Return the options of a JSON or YAML file: ``trainer_config.json``, or the file of ``trl grpo --config``.

    Raises:
        UsageError: the file cannot be read, or is not a mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix in (".py", ".sh"):
            advice = "for a script of verl, use --from-verl" if "verl" in text else "write its options to a YAML file"
            raise UsageError(f"{file} is a program, and --from-trl reads a file of options, YAML or JSON: {advice}")
        options = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise UsageError(f"{file} must have options with values, got {type(options).__name__}")
    return options


def trainer_of(options: Mapping[str, Any]) -> str:
    """Return the trainer whose options these are: ``grpo``, ``sft``, ...

    Raises:
        UsageError: no option belongs to one trainer alone.
    """
    for trainer, marks in _MARKS.items():
        if not marks.isdisjoint(options):
            return trainer
    raise UsageError(f"the options do not show whose they are: add --trainer {', '.join(SECTIONS_OF)}")


def converted(options: Mapping[str, Any], trainer: str, devices: int) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration, and a line for each option that was not carried over.

    Args:
        options: options of TRL by their names.
        trainer: trainer of TRL, such as ``grpo``.
        devices: number of processes of the run of TRL, by which its batch counts.
    """
    return _Conversion(options, trainer, devices).result()


class _Conversion:
    def __init__(self, options: Mapping[str, Any], trainer: str, devices: int) -> None:
        given = {name: value for name, value in options.items() if value not in (None, "", [], {})}
        self._options = GivenOptions(given, _DEFAULTS[trainer])
        self._nulls = {name for name, value in options.items() if value is None}
        self._carry = self._options.carry
        self._trainer, self._devices = trainer, devices
        self._is_online = trainer in ("grpo", "rloo")

    def result(self) -> tuple[dict[str, Any], list[str]]:
        module, data = _MODULES[self._trainer]
        loss: dict[str, Any] = {}
        if self._trainer == "grpo":
            module, loss = grpo_loss(self._options)
        elif self._trainer in PAIRED:
            loss = PAIRED[self._trainer](self._options)
        elif self._trainer == "reward" and (coefficient := self._carry("center_rewards_coefficient")):
            loss = {"loss": {"center_coef": float(coefficient)}}
        config: dict[str, Any] = {
            "seed_everything": int(self._carry("seed", 42)),
            "model": {"class_path": f"lightning_rlhf.{module}", "init_args": self._module() | loss},
            "data": {"class_path": f"lightning_rlhf.{data}", "init_args": self._data()},
            "trainer": self._run(),
        }
        known = {name for section in SECTIONS_OF[self._trainer] for name in table("trl").get(section, {})}
        return config, self._options.left(partial(counterpart, self._trainer), "TRL 1.16", known)

    def _module(self) -> dict[str, Any]:
        options: dict[str, Any] = {("reward_model" if self._trainer == "reward" else "actor"): self._source()}
        options["optimizer"] = self._optimizer()
        kind = str(self._carry("lr_scheduler_type"))
        warmup = self._warmup()
        if kind not in ("constant", *schedules()):
            self._options.leave("lr_scheduler_type", f"RunSchedule has {', '.join(schedules())}")
        elif kind != "constant":
            schedule: dict[str, Any] = {"kind": kind, "warmup_ratio": warmup}
            if arguments := self._carry("lr_scheduler_kwargs"):
                schedule["arguments"] = arguments
            options["lr_scheduler"] = {
                "class_path": "lightning_rlhf.modules.schedules.RunSchedule",
                "init_args": schedule,
            }
        self._options.settle("packing", "padding_free")  # packing is the default here
        if self._given("packing"):
            self._options.note("packing: TRL's batch sizes count packed texts of max_length tokens, batch_size rows")
        options["max_grad_norm"] = float(self._carry("max_grad_norm")) or None  # 0 does not clip in TRL
        if self._trainer == "grpo":
            options["kl_loss"] = {"coef": float(self._carry("beta")), "estimator": "k3"}
            if options["kl_loss"]["coef"] and self._carry("use_bias_correction_kl", True):
                options["kl_loss"]["importance"] = True
            self._options.settle("use_bias_correction_kl")
            if self._carry("use_vllm") and self._carry("vllm_importance_sampling_correction", True):
                options["correction"] = self._correction()
        if self._trainer == "rloo":
            options["kl_reward"] = {"coef": float(self._carry("beta")), "estimator": "k1"}
        if self._is_online:
            options["update_epochs"] = int(self._carry("num_iterations"))
            if entropy := self._carry("entropy_coef"):
                options["ent_coef"] = float(entropy)
            step, update = self._texts_of_step(), self._texts_of_update()
            if step != update:
                options["minibatch_size"] = update
            if step % update:
                self._options.note(f"minibatch_size {update} does not divide {step} responses")
            if path := self._carry("reward_model_name_or_path"):
                options["reward_model"] = path
        if self._carry("precompute_ref_log_probs"):
            options["ref"] = "start"
        return options

    def _optimizer(self) -> dict[str, Any]:
        betas = [self._carry("adam_beta1", 0.9), self._carry("adam_beta2", 0.999)]
        options = {
            "lr": float(self._carry("learning_rate")),
            "weight_decay": float(self._carry("weight_decay", 0.0)),
            "betas": [float(each) for each in betas],
            "eps": float(self._carry("adam_epsilon", 1e-8)),
        }
        kind = str(self._carry("optim", "adamw_torch"))
        if kind in _OPTIMIZERS:
            return {"class_path": _OPTIMIZERS[kind], "init_args": options}
        if not kind.startswith("adamw_torch"):
            self._options.leave("optim")
        return options

    def _given(self, name: str) -> Any:
        return self._options.given.get(name)

    def _warmup(self) -> float:
        """Return the share of the run in which the learning rate rises."""
        ratio = float(self._carry("warmup_ratio", 0.0))
        steps, whole = float(self._carry("warmup_steps", 0)), int(self._carry("max_steps", -1))
        if steps < 1:
            return steps or ratio
        if whole > 0:
            return min(1.0, steps / whole)
        self._options.leave("warmup_steps", "the number of steps is not known here: set warmup_ratio of lr_scheduler")
        return ratio

    def _correction(self) -> dict[str, Any]:
        """Return the weights of the gap between vLLM and the actor, which TRL has by default."""
        level, _, mode = str(self._carry("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
        upper = self._carry("vllm_importance_sampling_cap") or self._carry("vllm_importance_sampling_clip_max", 3.0)
        options = {"level": level, "mode": mode, "upper": float(upper)}
        if lower := self._carry("vllm_importance_sampling_clip_min"):
            options["lower"] = float(lower)
        return {"class_path": "lightning_rlhf.objectives.corrections.RolloutCorrection", "init_args": options}

    def _steps(self, updates: int) -> int:
        """Return the steps with a number of updates: a step here has all updates of its responses."""
        if not self._is_online:
            return updates
        texts = self._texts_of_step() * int(self._carry("num_iterations"))
        return math.ceil(updates * self._texts_of_update() / texts)

    def _texts_of_update(self) -> int:
        """Return the texts of an update, over all devices."""
        per_device = int(self._carry("per_device_train_batch_size"))
        return per_device * int(self._carry("gradient_accumulation_steps", 1)) * self._devices

    def _texts_of_step(self) -> int:
        """Return the texts of a step: the responses that are generated at once, or the texts of an update."""
        if not self._is_online:
            return self._texts_of_update()
        if size := self._carry("generation_batch_size"):
            return int(size)
        if steps := self._carry("steps_per_generation"):
            return int(steps) * int(self._carry("per_device_train_batch_size")) * self._devices
        return self._texts_of_update()

    def _source(self) -> Any:
        path = self._carry("model_name_or_path")
        if path is None:
            self._options.note("model_name_or_path: the file names no model; write it to run.yaml, in two places")
        source: dict[str, Any] = {"path": path or _NO_MODEL}
        kwargs = self._carry("model_init_kwargs", {})
        for ours, theirs in (("revision", "model_revision"), ("dtype", "dtype"), ("attn_implementation",) * 2):
            value = self._carry(theirs, kwargs.get(ours))
            if value not in (None, "main", "auto"):
                source[ours] = value
        source["dtype"] = source.get("dtype") or self._carry("torch_dtype")
        bits = {name: bool(self._carry(f"load_in_{name}")) for name in ("4bit", "8bit")}
        if any([self._carry("use_peft"), *bits.values()]):
            source["lora"] = self._lora()
        if "lora" not in source and str(source["dtype"]) in ("bfloat16", "float16"):
            self._options.note(f"dtype: {source['dtype']}: trained weights are float32 here, computed in bf16-mixed")
            source["dtype"] = None
        if source["dtype"] in (None, "auto"):
            del source["dtype"]
        if any(bits.values()):
            source["quantization"] = "nf4" if bits["4bit"] else "int8"
        if set(source) == {"path"}:
            return source["path"]
        return {"class_path": "lightning_rlhf.Pretrained", "init_args": source}

    def _lora(self) -> dict[str, Any]:
        adapters = {ours: self._carry(theirs) for ours, theirs in _LORA.items()}
        if not self._is_online and self._carry("disable_dropout", self._trainer != "sft") is False:
            adapters["dropout"] = self._carry("lora_dropout", _DROPOUT)
        elif self._is_online and self._given("lora_dropout"):
            self._options.leave("lora_dropout", "importance ratios compare two passes of one network: it is 0 here")
        else:
            self._options.settle("lora_dropout")  # TRL switches it off as well
        targets = adapters.get("target_modules")
        if targets is None:  # peft's default for most models
            adapters["target_modules"] = ["q_proj", "v_proj"]
        elif targets in ("all-linear", ["all-linear"]):
            adapters["target_modules"] = None  # all linear layers
        elif isinstance(targets, str):
            adapters["target_modules"] = [targets]
        return {"rank": 16, "alpha": 32} | {name: value for name, value in adapters.items() if value}

    def _data(self) -> dict[str, Any]:
        name = self._carry("dataset_name")
        if name is None:
            self._options.note("dataset_name: the file names no data; write your rows to run.yaml, under train")
            name = "set the rows of training"
        train: Any = name
        split, config = self._carry("dataset_train_split", "train"), self._carry("dataset_config")
        hub = "lightning_rlhf.data.rows.HubDataset"

        def rows(split: str) -> dict[str, Any]:
            return {
                "class_path": hub,
                "init_args": {"path": name, "split": split, **({"name": config} if config else {})},
            }

        if split != "train" or config:
            train = rows(split)
        data: dict[str, Any] = {"tokenizer": self._carry("model_name_or_path", _NO_MODEL), "train": train}
        if self._carry("eval_strategy", "no") != "no":
            data["val"] = rows(self._carry("dataset_test_split", "test"))
            if size := self._carry("per_device_eval_batch_size"):
                data["val_batch_size"] = int(size) * self._devices
        texts = self._texts_of_step()
        group = int(self._carry("num_generations")) if self._is_online else 1
        data["batch_size"] = max(1, texts // group)
        if texts % group:
            self._options.note(f"per_device_train_batch_size: {texts} responses of a step are no multiple of {group}")
        data |= self._lengths()
        if (column := self._carry("dataset_prompt_column", "prompt")) != "prompt":
            data["columns"] = {"prompt": column}
        if not self._is_online and (column := self._carry("dataset_text_field", "text")) != "text":
            data["columns"] = {"text": column}
        if self._options.values.get("shuffle_dataset") is False:
            data["shuffle"] = False
        if kwargs := self._carry("chat_template_kwargs"):
            data["chat_template_kwargs"] = kwargs
        return data

    def _lengths(self) -> dict[str, Any]:
        """Return the options of the data for texts that are too long."""
        if self._is_online:
            if self._given("max_prompt_length") is None:
                self._options.note("max_tokens of the data is 512: TRL has no limit, prompts that are longer are named")
            return {"max_tokens": int(self._carry("max_prompt_length", 512))}
        if "max_length" in self._nulls:
            self._options.note(f"max_length: null: texts beyond {_ANY_LENGTH} tokens, max_tokens here, are named")
            return {"max_tokens": _ANY_LENGTH, "too_long": "bad_row"}
        length = self._carry("max_length")
        if self._given("max_length") is None:
            length = self._carry("max_seq_length", length)
        cut = "cut_start" if self._carry("truncation_mode") == "keep_end" else "cut_end"
        return {"max_tokens": int(length), "too_long": cut}

    def _run(self) -> dict[str, Any]:
        run: dict[str, Any] = {}
        if (steps := int(self._carry("max_steps", -1))) > 0:
            run["max_steps"] = self._steps(steps)
            self._options.settle("num_train_epochs")
        else:
            epochs = float(self._carry("num_train_epochs"))
            run["max_epochs"] = max(1, round(epochs))
            if not epochs.is_integer():
                self._options.leave("num_train_epochs", f"max_epochs is {run['max_epochs']}: set max_steps for a part")
        if self._carry("bf16"):
            run["precision"] = "bf16-mixed"
        name = "single" if self._devices == 1 else "fsdp" if self._carry("fsdp") else "ddp"
        if self._devices > 1:
            run |= {"devices": self._devices, "strategy": f"rlhf_{name}"}
        if self._carry("gradient_checkpointing"):
            run["strategy"] = {"class_path": _STRATEGIES[name], "init_args": {"activation_checkpointing": True}}
        if logger := self._logger():
            run["logger"] = logger
        self._options.settle(*(name for name in _STRATEGIES_OF_STEPS if self._given(name) == "steps"))
        if self._carry("eval_strategy", "no") == "steps" or "eval_strategy" not in self._options.given:
            if (every := float(self._carry("eval_steps", 0))) >= 1:
                run["val_check_interval"] = self._steps(int(every))
            elif every:
                run["val_check_interval"] = every
                self._options.note(f"eval_steps: {every}: a fraction of the run in TRL, of an epoch here")
        else:
            self._options.settle("eval_steps")
        callbacks: list[Any] = []
        if self._is_online:
            callbacks.append({"class_path": "lightning_rlhf.callbacks.RolloutLoop", "init_args": self._rollout()})
        saves: dict[str, int] = {}
        if (every := float(self._carry("save_steps", 0))) >= 1:
            saves["every_n_steps"] = self._steps(int(every))
        else:  # a fraction of the run
            self._options.leave("save_steps")
        if keep := self._carry("save_total_limit"):
            saves["keep_last"] = int(keep)
        callbacks.append({"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": saves})
        if (every := float(self._carry("logging_steps", 0))) >= 1:
            lines = {"every_n_steps": self._steps(int(every))}
            callbacks.append({"class_path": "lightning_rlhf.callbacks.Console", "init_args": lines})
        elif every:
            self._options.leave("logging_steps", "a fraction of the run: set every_n_steps of Console")
        return {**run, "callbacks": callbacks, "default_root_dir": self._carry("output_dir", f"runs/{self._trainer}")}

    def _logger(self) -> dict[str, Any]:
        names = self._carry("report_to", "none")
        name = names[0] if isinstance(names, list) else names
        if name not in _LOGGERS:
            if name not in ("none", "tensorboard", "all"):
                self._options.leave("report_to")
            return {}
        arguments: dict[str, Any] = {}
        for ours, theirs in _LOGGER_ARGUMENTS[name].items():
            if value := next(filter(None, map(self._carry, theirs)), None):
                arguments[ours] = value
        return {"class_path": _LOGGERS[name], "init_args": arguments}

    def _reward(self, function: str) -> dict[str, Any]:
        if function in _TRL_REWARDS:
            self._options.note(
                f"reward_funcs: {function} is one of TRL's own, which must be installed: pip install trl"
            )
            return {"function": f"trl.rewards.{function}", "messages": True}
        return {"function": function if "." in function else f"reward.py:{function}"}

    def _rollout(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "group_size": int(self._carry("num_generations")),
            "max_response_tokens": int(self._carry("max_completion_length")),
            "temperature": float(self._carry("temperature")),
        }
        if "max_completion_length" in self._nulls:
            self._options.note("max_completion_length: null has no limit in TRL; max_response_tokens is 512 here")
        if samples := self._carry("num_generations_eval"):
            options["val_samples"] = int(samples)
        functions = self._carry("reward_funcs", [])
        weights = (self._carry("reward_weights") if functions else None) or [1.0] * len(functions)
        if len(weights) != len(functions):
            raise UsageError(f"reward_weights has {len(weights)} numbers for {len(functions)} reward_funcs")
        options["rewards"] = [
            {**self._reward(str(function)), "weight": weight}
            for function, weight in zip(functions, weights, strict=True)
        ]
        if not functions and self._carry("reward_model_name_or_path"):
            del options["rewards"]
        elif not functions:
            options["rewards"] = [{"function": "reward.py:reward"}]
            self._options.note("reward_funcs: functions are passed in Python; write them to reward.py, by their names")
        self._options.settle("use_vllm")
        if self._carry("vllm_mode", "colocate") != "colocate":
            self._options.leave("vllm_mode")
        engine = {ours: self._carry(theirs) for ours, theirs in _ENGINE.items()}
        if engine := {name: value for name, value in engine.items() if value}:
            options["engine"] = vllm_engine(engine)
        return options
