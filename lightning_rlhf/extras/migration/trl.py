"""A configuration from the options of a trainer of TRL, and the options that could not be carried over."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.parts import Counterpart, table

# Sections of the table in which the options of a trainer are looked up, its own first.
_COMMON = ("ModelConfig", "ScriptArguments", "TrainingArguments", "Earlier and further names")
SECTIONS_OF = {
    "sft": ("SFTConfig", *_COMMON),
    "dpo": ("DPOConfig", "SFTConfig", *_COMMON),
    "kto": ("KTOConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "reward": ("RewardConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "rloo": ("RLOOConfig", "GRPOConfig", "DPOConfig", "SFTConfig", *_COMMON),
    "grpo": ("GRPOConfig", "DPOConfig", "SFTConfig", *_COMMON),
}
# Options by which a file without the name of its trainer is recognised.
_MARKS = {
    "kto": {"desirable_weight", "undesirable_weight"},
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "grpo": {"num_generations", "max_completion_length", "reward_funcs"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "discopop_tau"},
    "sft": {"max_seq_length", "packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"},
}
# Defaults of TRL 1.16 that decide what a run learns; ours differ from some of them.
_ALL = {"per_device_train_batch_size": 8, "num_train_epochs": 3.0, "lr_scheduler_type": "linear", "max_grad_norm": 1.0}
_ONLINE = {"max_completion_length": 512, "temperature": 1.0, "num_iterations": 1, "epsilon": 0.2}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {**_ALL, "learning_rate": 2e-5, "max_length": 1024},
    "dpo": {**_ALL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "kto": {**_ALL, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "reward": {**_ALL, "learning_rate": 1e-4, "max_length": 1024},
    "rloo": {**_ALL, **_ONLINE, "learning_rate": 1e-6, "num_generations": 2, "beta": 0.05},
    "grpo": {**_ALL, **_ONLINE, "learning_rate": 1e-6, "num_generations": 8, "beta": 0.0, "loss_type": "dapo"},
}  # fmt: skip
_MODULES = {
    "sft": ("SFTModule", "ConversationDataModule"), "dpo": ("DPOModule", "PreferenceDataModule"),
    "kto": ("KTOModule", "UnpairedDataModule"), "reward": ("RewardModule", "PreferenceDataModule"),
    "rloo": ("RLOOModule", "PromptDataModule"), "grpo": ("GRPOModule", "PromptDataModule"),
}  # fmt: skip
_GRPO_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPOModule", {}),
    "dapo": ("GRPOModule", {"aggregation": {"class_path": "lightning_rlhf.objectives.aggregation.TokenMean"}}),
    "dr_grpo": ("DrGRPOModule", {}),
    "cispo": ("CISPOModule", {}),
    "sapo": ("SAPOModule", {}),
}
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
_LOSSES = "lightning_rlhf.objectives.preference_losses"
_DPO_LOSSES = {
    "sigmoid": "DPOLoss", "hinge": "HingeLoss", "ipo": "IPOLoss", "robust": "RobustDPOLoss",
    "apo_zero": "APOZeroLoss", "apo_down": "APODownLoss",
}  # fmt: skip


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
        options = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise UsageError(f"{file} must have options with values, got {type(options).__name__}")
    return options


def trainer_of(options: Mapping[str, Any]) -> str:
    """Return the trainer whose options these are: ``grpo``, ``sft``, ...

    Raises:
        UsageError: they could be those of several.
    """
    for trainer, marks in _MARKS.items():
        if not marks.isdisjoint(options):
            return trainer
    raise UsageError("the options do not show whose they are: add --trainer grpo, rloo, sft, dpo, kto or reward")


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
        self._given = {name: value for name, value in options.items() if value not in (None, "", [], {})}
        self._values = {**_DEFAULTS[trainer], **self._given}
        self._trainer, self._devices = trainer, devices
        self._used: set[str] = set()
        self._notes: list[str] = []
        self._is_online = trainer in ("grpo", "rloo")

    def _take(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, which is carried over."""
        self._used.add(name)
        return self._values.get(name, default)

    def result(self) -> tuple[dict[str, Any], list[str]]:
        name, data_name = _MODULES[self._trainer]
        loss = self._loss()
        model = {"class_path": f"lightning_rlhf.{loss.pop('module', name)}", "init_args": self._module() | loss}
        config: dict[str, Any] = {
            "seed_everything": self._take("seed", 42),
            "model": model,
            "data": {"class_path": f"lightning_rlhf.{data_name}", "init_args": self._data()},
            "trainer": self._run(),
        }
        return config, [*self._notes, *self._left()]

    def _left(self) -> list[str]:
        """Return a line for each option that was given and not used."""
        lines = []
        for name, value in self._given.items():
            entry = counterpart(self._trainer, name)
            needs_none = entry is not None and not entry.option and not entry.is_missing
            if name in self._used or value is False or needs_none:
                continue
            reason = entry.sentence() if entry else "unknown to this table"
            lines.append(f"{name}: {value!r:.80} ({reason})")
        return lines

    def _module(self) -> dict[str, Any]:
        options: dict[str, Any] = {("reward_model" if self._trainer == "reward" else "actor"): self._source()}
        betas = [self._take("adam_beta1", 0.9), self._take("adam_beta2", 0.999)]
        options["optimizer"] = {
            "lr": float(self._take("learning_rate")),
            "weight_decay": float(self._take("weight_decay", 0.0)),
            "betas": [float(each) for each in betas],
            "eps": float(self._take("adam_epsilon", 1e-8)),
        }
        optimizer = str(self._take("optim", "adamw_torch"))
        if optimizer in _OPTIMIZERS:
            options["optimizer"] = {"class_path": _OPTIMIZERS[optimizer], "init_args": options["optimizer"]}
        elif not optimizer.startswith("adamw_torch"):
            self._used.discard("optim")
        kind = str(self._take("lr_scheduler_type"))
        warmup = float(self._take("warmup_ratio", 0.0) or 0.0)
        if 0 < (steps := float(self._take("warmup_steps", 0) or 0)) < 1:
            warmup = steps
        elif steps:
            self._used.discard("warmup_steps")
        if kind != "constant":
            schedule: dict[str, Any] = {"kind": kind, "warmup_ratio": warmup}
            if arguments := self._take("lr_scheduler_kwargs"):
                schedule["arguments"] = arguments
            options["lr_scheduler"] = {
                "class_path": "lightning_rlhf.modules.schedules.RunSchedule",
                "init_args": schedule,
            }
        self._used |= {name for name in ("packing", "padding_free") if self._values.get(name)}  # the default here
        options["max_grad_norm"] = float(self._take("max_grad_norm"))
        if self._trainer == "grpo":
            options["kl_loss"] = {"coef": float(self._take("beta")), "estimator": "k3"}
            if options["kl_loss"]["coef"] and self._take("use_bias_correction_kl", True):
                options["kl_loss"]["importance"] = True
            if self._take("use_vllm") and self._take("vllm_importance_sampling_correction", True):
                options["correction"] = self._correction()
        if self._trainer == "rloo":
            options["kl_reward"] = {"coef": float(self._take("beta")), "estimator": "k1"}
        if self._is_online:
            options["update_epochs"] = int(self._take("num_iterations"))
            if self._take("entropy_coef"):
                options["ent_coef"] = float(self._values["entropy_coef"])
            if generated := self._generated():
                options["minibatch_size"] = self._responses()
                if generated % self._responses():
                    self._notes.append(f"minibatch_size {self._responses()} does not divide {generated} responses")
        if self._take("precompute_ref_log_probs"):
            options["ref"] = "start"
        return options

    def _correction(self) -> dict[str, Any]:
        """Return the weights of the gap between vLLM and the actor, which TRL has by default."""
        level, _, mode = str(self._take("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
        upper = self._take("vllm_importance_sampling_cap") or self._take("vllm_importance_sampling_clip_max", 3.0)
        options = {"level": level, "mode": mode, "upper": float(upper)}
        if lower := self._take("vllm_importance_sampling_clip_min"):
            options["lower"] = float(lower)
        return {"class_path": "lightning_rlhf.objectives.corrections.RolloutCorrection", "init_args": options}

    def _steps(self, updates: int) -> int:
        """Return the steps with a number of updates: a step here has all updates of its responses."""
        if not self._is_online:
            return updates
        generated = self._generated() or self._responses()
        return math.ceil(updates * self._responses() / (generated * int(self._values["num_iterations"])))

    def _responses(self) -> int:
        """Return the texts of an update, over all devices."""
        per_device = int(self._take("per_device_train_batch_size"))
        return per_device * int(self._take("gradient_accumulation_steps", 1)) * self._devices

    def _generated(self) -> int:
        """Return the responses of a step if they are not those of one update; else 0."""
        if size := self._take("generation_batch_size"):
            return int(size)
        if steps := self._take("steps_per_generation"):
            return int(steps) * int(self._values["per_device_train_batch_size"]) * self._devices
        return 0

    def _source(self) -> Any:
        path = self._take("model_name_or_path", "set the model")
        source: dict[str, Any] = {"path": path}
        kwargs = self._take("model_init_kwargs", {})
        for ours, theirs in (("revision", "model_revision"), ("dtype", "dtype"), ("attn_implementation",) * 2):
            value = self._take(theirs, kwargs.get(theirs))
            if value not in (None, "main", "auto"):
                source[ours] = value
        source["dtype"] = source.get("dtype") or self._take("torch_dtype")
        adapters = {ours: self._take(theirs) for ours, theirs in _LORA.items()}
        if any([self._take("use_peft"), self._take("load_in_4bit"), self._take("load_in_8bit")]):
            source["lora"] = {"rank": 16, "alpha": 32} | {name: value for name, value in adapters.items() if value}
        if "lora" not in source and str(source["dtype"]) in ("bfloat16", "float16"):
            self._notes.append(f"dtype: {source['dtype']}: trained weights are float32 here, computed in bf16-mixed")
            source["dtype"] = None
        if source["dtype"] in (None, "auto"):
            del source["dtype"]
        if self._values.get("load_in_4bit"):
            source["quantization"] = "nf4"
        if self._values.get("load_in_8bit"):
            source["quantization"] = "int8"
        if set(source) == {"path"}:
            return path
        return {"class_path": "lightning_rlhf.Pretrained", "init_args": source}

    def _loss(self) -> dict[str, Any]:
        loss = self._take("loss_type") if self._trainer in ("grpo", "dpo") else None
        if self._trainer == "dpo":
            return self._dpo_loss(loss)
        if self._trainer == "kto":
            return {"loss": {name: self._take(name, 1.0) for name in ("desirable_weight", "undesirable_weight")}
                    | {"beta": self._take("beta")}}  # fmt: skip
        if self._trainer == "reward" and (coefficient := self._take("center_rewards_coefficient")):
            return {"loss": {"center_coef": coefficient}}
        if self._trainer != "grpo":
            return {}
        low = float(self._take("epsilon"))
        clip = {"clip_range_low": low, "clip_range_high": float(self._take("epsilon_high", low))}
        if self._take("importance_sampling_level") == "sequence":
            return {"module": "GSPOModule", "policy_loss": clip}
        if loss not in _GRPO_LOSSES:
            self._used.discard("loss_type")
            loss = "dapo"
        module, options = _GRPO_LOSSES[loss][0], dict(_GRPO_LOSSES[loss][1])
        if module in ("GRPOModule", "DrGRPOModule"):
            options["policy_loss"] = clip
        if module == "GRPOModule" and self._take("scale_rewards", "group") in ("none", False):
            options["advantages"] = {"normalize_std": False}
        if self._values.get("scale_rewards") == "batch":
            self._used.discard("scale_rewards")
        return {"module": module, **options}

    def _dpo_loss(self, loss: Any) -> dict[str, Any]:
        kinds = loss if isinstance(loss, list) else [loss or "sigmoid"]
        options: dict[str, Any] = {"beta": float(self._take("beta"))}
        if len(kinds) == 2 and kinds[1] == "sft":
            weights = self._take("loss_weights", [1.0, 1.0])
            kinds, supervised = kinds[:1], {"sft_coef": float(weights[1]) / float(weights[0])}
        else:
            supervised = {}
        if len(kinds) != 1 or kinds[0] not in _DPO_LOSSES:
            self._used.discard("loss_type")
            kinds = ["sigmoid"]
        if smoothing := self._take("label_smoothing"):
            options["label_smoothing"] = float(smoothing)
        return {"loss": {"class_path": f"{_LOSSES}.{_DPO_LOSSES[kinds[0]]}", "init_args": options}, **supervised}

    def _data(self) -> dict[str, Any]:
        name = self._take("dataset_name", "set the rows of training")
        train: Any = name
        split, config = self._take("dataset_train_split", "train"), self._take("dataset_config")
        hub = "lightning_rlhf.data.rows.HubDataset"

        def rows(split: str) -> dict[str, Any]:
            return {
                "class_path": hub,
                "init_args": {"path": name, "split": split, **({"name": config} if config else {})},
            }

        if split != "train" or config:
            train = rows(split)
        data: dict[str, Any] = {"tokenizer": self._take("model_name_or_path", "set the model"), "train": train}
        if self._take("eval_strategy", "no") != "no":
            data["val"] = rows(self._take("dataset_test_split", "test"))
            if size := self._take("per_device_eval_batch_size"):
                data["val_batch_size"] = int(size) * self._devices
        texts = self._generated() or self._responses() if self._is_online else self._responses()
        group = int(self._take("num_generations")) if self._is_online else 1
        data["batch_size"] = max(1, texts // group)
        if texts % group:
            self._notes.append(f"per_device_train_batch_size: {texts} responses of a step are no multiple of {group}")
        longest = self._take("max_prompt_length", 512) if self._is_online else self._take("max_length")
        if not self._is_online and "max_length" not in self._given:
            longest = self._take("max_seq_length", longest)
        data["max_tokens"] = int(longest)
        if self._is_online and "max_prompt_length" not in self._given:
            self._notes.append("max_tokens of the data is 512: TRL has no limit, prompts that are longer are named")
        if not self._is_online:
            data["too_long"] = "cut_start" if self._take("truncation_mode") == "keep_end" else "cut_end"
        if (column := self._take("dataset_prompt_column", "prompt")) != "prompt":
            data["columns"] = {"prompt": column}
        if kwargs := self._take("chat_template_kwargs"):
            data["chat_template_kwargs"] = kwargs
        return data

    def _run(self) -> dict[str, Any]:
        run: dict[str, Any] = {}
        if (steps := int(self._take("max_steps", -1))) > 0:
            run["max_steps"] = self._steps(steps)
            self._take("num_train_epochs")
        else:
            run["max_epochs"] = max(1, round(float(self._take("num_train_epochs"))))
        if self._take("bf16", True):
            run["precision"] = "bf16-mixed"
        name = "single" if self._devices == 1 else "fsdp" if self._take("fsdp") else "ddp"
        if self._devices > 1:
            run |= {"devices": self._devices, "strategy": f"rlhf_{name}"}
        if self._take("gradient_checkpointing"):
            run["strategy"] = {"class_path": _STRATEGIES[name], "init_args": {"activation_checkpointing": True}}
        logger = self._take("report_to", "none")
        if (logger := logger[0] if isinstance(logger, list) else logger) in _LOGGERS:
            run["logger"] = {"class_path": _LOGGERS[logger], "init_args": {}}
        elif logger not in ("none", "tensorboard", "all"):
            self._used.discard("report_to")
        self._used |= {name for name in ("save_strategy", "logging_strategy") if self._values.get(name) == "steps"}
        if self._take("eval_steps"):
            run["val_check_interval"] = self._steps(int(self._values["eval_steps"]))
        callbacks: list[Any] = []
        if self._is_online:
            callbacks.append({"class_path": "lightning_rlhf.callbacks.RolloutLoop", "init_args": self._rollout()})
        saves: dict[str, int] = {}
        if (every := float(self._take("save_steps", 0))) >= 1:
            saves["every_n_steps"] = self._steps(int(every))
        else:  # a fraction of the run
            self._used.discard("save_steps")
        if keep := self._take("save_total_limit"):
            saves["keep_last"] = int(keep)
        callbacks.append({"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": saves})
        if self._take("logging_steps") and float(self._values["logging_steps"]) >= 1:
            lines = {"every_n_steps": self._steps(int(self._values["logging_steps"]))}
            callbacks.append({"class_path": "lightning_rlhf.callbacks.Console", "init_args": lines})
        return {**run, "callbacks": callbacks, "default_root_dir": self._take("output_dir", f"runs/{self._trainer}")}

    def _rollout(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "group_size": int(self._take("num_generations")),
            "max_response_tokens": int(self._take("max_completion_length")),
            "temperature": float(self._take("temperature")),
        }
        functions = self._take("reward_funcs", [])
        weights = self._take("reward_weights") or [1.0] * len(functions)
        options["rewards"] = [
            {"function": function if "." in str(function) else f"reward.py:{function}", "weight": weight}
            for function, weight in zip(functions, weights, strict=False)
        ] or [{"function": "reward.py:reward"}]
        if not functions:
            self._notes.append("reward_funcs: functions are passed in Python; write them to reward.py, by their names")
        engine = {ours: self._take(theirs) for ours, theirs in _ENGINE.items()}
        self._take("use_vllm")
        if self._values.get("vllm_mode") == "colocate":
            self._take("vllm_mode")
        if engine := {name: value for name, value in engine.items() if value}:
            path = "lightning_rlhf.rollout.vllm.engine.VLLMEngine"
            options["engine"] = {"class_path": path, "init_args": engine}
        return options


_LORA: dict[str, str] = {
    "rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "lora_target_modules",
    "rslora": "use_rslora", "dora": "use_dora",
}  # fmt: skip
_ENGINE: dict[str, str] = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization", "tensor_parallel_size": "vllm_tensor_parallel_size",
    "sleep_while_learning": "vllm_enable_sleep_mode",
}  # fmt: skip
