"""A configuration from the options of a script of verl, and the options that could not be carried over."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.parts import Counterpart, table

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ESTIMATORS = {
    "gae": "PPOModule", "grpo": "GRPOModule", "rloo": "RLOOModule", "remax": "ReMaxModule", "opo": "OPOModule",
    "reinforce_plus_plus": "ReinforcePlusPlusModule", "gpg": "GPGModule",
    "reinforce_plus_plus_baseline": "ReinforcePlusPlusModule",
}  # fmt: skip
_LOSS_MODES = {"gspo": "GSPOModule", "sapo": "SAPOModule", "geo_mean": "GMPOModule", "cispo": "CISPOModule"}
_AGGREGATIONS = {
    "token-mean": "TokenMean", "seq-mean-token-sum": "SequenceMeanTokenSum",
    "seq-mean-token-mean": "SequenceMeanTokenMean",
}  # fmt: skip
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_TRUNCATION = {"error": "bad_row", "left": "cut_start", "right": "cut_end", "middle": "cut_middle"}
_LOGGERS = {"wandb": "lightning.pytorch.loggers.WandbLogger", "mlflow": "lightning.pytorch.loggers.MLFlowLogger"}
# Defaults of verl that decide what a run learns.
_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0, "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001, "critic.optim.lr": 1e-5, "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.train_batch_size": 1024, "data.truncation": "error",
    "trainer.total_epochs": 30, f"{_ACTOR}.optim.lr": 1e-6, f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ACTOR}.ppo_epochs": 1, f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.entropy_coeff": 0.0, f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl", f"{_ACTOR}.grad_clip": 1.0, f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.temperature": 1.0,
}  # fmt: skip


_SUPERVISED: dict[str, Any] = {
    "data.train_batch_size": 256, "data.max_length": 1024, "data.truncation": "error", "trainer.total_epochs": 4,
    "optim.lr": 1e-5, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.01, "optim.clip_grad": 1.0,
    "optim.lr_warmup_steps_ratio": 0.1, "trainer.n_gpus_per_node": 1,
}  # fmt: skip


def counterpart(option: str) -> Counterpart | None:
    """Return what an option of verl is here; None for an unknown option."""
    for section, options in table("verl").items():
        if not option.startswith(f"{section}."):
            continue
        name = option.removeprefix(f"{section}.")
        pattern = next((each for each in options if fnmatchcase(name, each)), None)
        if pattern is not None:
            return options[pattern]
    return None


def converted(options: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration, and a line for each option that was not carried over.

    Args:
        options: texts of the options by their names, such as ``data.train_files``.

    Raises:
        UsageError: they are not those of verl's ``main_ppo``.
    """
    if any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in options):
        return _Conversion(options, _DEFAULTS).result()
    if "model.partial_pretrain" in options or "optim.lr" in options:
        return _Supervised(options, _SUPERVISED).result()
    raise UsageError(
        "the script has no options of verl's main_ppo or of its SFT trainer, such as actor_rollout_ref.model.path or "
        "model.partial_pretrain"
    )


class _Conversion:
    def __init__(self, options: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self._given = {name: _value(text) for name, text in options.items()}
        self._values = {**defaults, **self._given}
        self._used: set[str] = set()
        self._notes: list[str] = []

    def _take(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, which is carried over."""
        self._used.add(name)
        value = self._values.get(name, default)
        return default if value is None else value

    def _actor(self, name: str, default: Any = None) -> Any:
        return self._take(f"{_ACTOR}.{name}", default)

    def result(self) -> tuple[dict[str, Any], list[str]]:
        module = self._module_name()
        config = {
            "seed_everything": int(self._take("data.seed", 42)),
            "model": {"class_path": f"lightning_rlhf.{module}", "init_args": self._module(module)},
            "data": {"class_path": "lightning_rlhf.PromptDataModule", "init_args": self._data()},
            "trainer": self._run(),
        }
        return config, self._left()

    def _left(self) -> list[str]:
        """Return the notes, and a line for each option that was given and not used."""
        left = []
        for name, value in self._given.items():
            entry = counterpart(name)
            needs_none = entry is not None and not entry.option and not entry.is_missing
            if name in self._used or value in (False, None, "", []) or needs_none:
                continue
            left.append(f"{name}: {value!r:.80} ({entry.sentence() if entry else 'unknown to this table'})")
        return [*self._notes, *left]

    def _module_name(self) -> str:
        mode = str(self._actor("policy_loss.loss_mode", "vanilla"))
        estimator = str(self._take("algorithm.adv_estimator"))
        if mode in _LOSS_MODES and estimator == "grpo":
            return _LOSS_MODES[mode]
        if mode != "vanilla":
            self._used.discard(f"{_ACTOR}.policy_loss.loss_mode")
        if estimator not in _ESTIMATORS:
            self._used.discard("algorithm.adv_estimator")
        return _ESTIMATORS.get(estimator, "GRPOModule")

    def _module(self, module: str) -> dict[str, Any]:
        group = int(self._take(f"{_ROLLOUT}.n"))
        options: dict[str, Any] = {"actor": self._source()}
        if module == "PPOModule":
            options["critic"] = self._path("critic.model.path") or "actor"
            options["critic_optimizer"] = {"lr": float(self._take("critic.optim.lr")), "weight_decay": 0.01}
            gamma, lam = float(self._take("algorithm.gamma")), float(self._take("algorithm.lam"))
            options["advantages"] = {"gamma": gamma, "gae_lambda": lam}
            if warmup := int(self._take("trainer.critic_warmup", 0)):
                options["critic_warmup_steps"] = warmup
        elif int(self._take("trainer.critic_warmup", 0)):
            self._used.discard("trainer.critic_warmup")
        rate, decay = float(self._actor("optim.lr")), float(self._actor("optim.weight_decay"))
        options["optimizer"] = {"lr": rate, "weight_decay": decay}
        if ratio := float(self._actor("optim.lr_warmup_steps_ratio", 0.0)):
            schedule = {"kind": "constant_with_warmup", "warmup_ratio": ratio}
            path = "lightning_rlhf.modules.schedules.RunSchedule"
            options["lr_scheduler"] = {"class_path": path, "init_args": schedule}
        options["minibatch_size"] = int(self._actor("ppo_mini_batch_size")) * group
        options["update_epochs"] = int(self._actor("ppo_epochs"))
        options["max_grad_norm"] = float(self._actor("grad_clip"))
        if tokens := self._actor("ppo_max_token_len_per_gpu"):
            options["micro_batch_tokens"] = int(tokens)
        if entropy := float(self._actor("entropy_coeff")):
            options["ent_coef"] = entropy
        aggregation = str(self._actor("loss_agg_mode"))
        if aggregation in _AGGREGATIONS:
            path = f"lightning_rlhf.objectives.aggregation.{_AGGREGATIONS[aggregation]}"
            options["aggregation"] = {"class_path": path}
        else:
            self._used.discard(f"{_ACTOR}.loss_agg_mode")
        if module in ("PPOModule", "GRPOModule"):
            options["policy_loss"] = self._clip()
        loss = bool(self._actor("use_kl_loss", False))
        kind = _KL.get(str(self._actor("kl_loss_type")), "k3")
        options["kl_loss"] = {"coef": float(self._actor("kl_loss_coef")) if loss else 0.0, "estimator": kind}
        if self._take("algorithm.use_kl_in_reward", False):
            kind = _KL.get(str(self._take("algorithm.kl_penalty")), "k1")
            options["kl_reward"] = {"coef": float(self._take("algorithm.kl_ctrl.kl_coef")), "estimator": kind}
        else:
            self._used |= {"algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"}
            if module in ("PPOModule", "RLOOModule", "ReMaxModule", "ReinforcePlusPlusModule"):
                options["kl_reward"] = {"coef": 0.0}
        if module == "GRPOModule" and self._take("algorithm.norm_adv_by_std_in_grpo", True) is False:
            options["advantages"] = {"normalize_std": False}
        if self._take("reward_model.enable", False) and (path := self._path("reward_model.model.path")):
            options["reward_model"] = path
        return options

    def _clip(self) -> dict[str, float]:
        both = float(self._actor("clip_ratio"))
        if both != 0.2 and not {f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"} & self._given.keys():
            self._notes.append(f"clip_ratio: {both} bounds both sides here; in verl, clip_ratio_low and _high stay 0.2")
        low, high = float(self._actor("clip_ratio_low", both)), float(self._actor("clip_ratio_high", both))
        return {"clip_range_low": low, "clip_range_high": high, "dual_clip": float(self._actor("clip_ratio_c"))}

    def _path(self, name: str) -> str:
        return str(self._take(name, ""))

    def _source(self) -> Any:
        path = self._path("actor_rollout_ref.model.path") or "set the model"
        rank = int(self._take("actor_rollout_ref.model.lora_rank", 0))
        if not rank:
            return path
        alpha = self._take("actor_rollout_ref.model.lora_alpha", 16)
        lora: dict[str, Any] = {"rank": rank, "alpha": alpha}
        targets = self._take("actor_rollout_ref.model.target_modules", "all-linear")
        if targets != "all-linear":
            lora["target_modules"] = targets
        return {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": path, "lora": lora}}

    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"tokenizer": self._path("actor_rollout_ref.model.path") or "set the model"}
        data["train"] = self._take("data.train_files", "set the rows of training")
        if (val := self._take("data.val_files")) is not None:
            data["val"] = val
        data["batch_size"] = int(self._take("data.train_batch_size"))
        if size := self._take("data.val_batch_size"):
            data["val_batch_size"] = int(size)
        data["max_tokens"] = int(self._take("data.max_prompt_length"))
        too_long = _TRUNCATION.get(str(self._take("data.truncation")), "bad_row")
        data["too_long"] = "drop" if self._take("data.filter_overlong_prompts", False) else too_long
        if (key := self._take("data.prompt_key", "prompt")) != "prompt":
            data["columns"] = {"prompt": key}
        if self._take("data.shuffle", True) is False:
            data["shuffle"] = False
        return data

    def _run(self) -> dict[str, Any]:
        run: dict[str, Any] = {}
        if steps := self._take("trainer.total_training_steps"):
            run["max_steps"] = int(steps)
            self._take("trainer.total_epochs")
        else:
            run["max_epochs"] = int(self._take("trainer.total_epochs"))
        run |= {"devices": int(self._take("trainer.n_gpus_per_node", 8)), "precision": "bf16-mixed"}
        if (nodes := int(self._take("trainer.nnodes", 1))) > 1:
            run["num_nodes"] = nodes
        run["strategy"] = self._strategy()
        if (frequency := int(self._take("trainer.test_freq", -1))) > 0:
            run["val_check_interval"] = frequency
        loggers = self._take("trainer.logger", [])
        loggers = [loggers] if isinstance(loggers, str) else loggers
        if name := next((each for each in loggers if each in _LOGGERS), None):
            arguments = {"project": str(self._values.get("trainer.project_name", "")), "name": str(self._name())}
            run["logger"] = {"class_path": _LOGGERS[name], "init_args": arguments if name == "wandb" else {}}
            self._used.add("trainer.project_name")
        else:
            self._used |= {"trainer.project_name", "trainer.logger"}
        saves: dict[str, int] = {}
        if (frequency := int(self._take("trainer.save_freq", -1))) > 0:
            saves["every_n_steps"] = frequency
        if keep := self._take("trainer.max_actor_ckpt_to_keep"):
            saves["keep_last"] = int(keep)
        callbacks = [
            {"class_path": "lightning_rlhf.callbacks.RolloutLoop", "init_args": self._rollout()},
            {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": saves},
        ]
        directory = self._take("trainer.default_local_dir", f"runs/{self._name()}")
        return {**run, "callbacks": callbacks, "default_root_dir": str(directory)}

    def _name(self) -> Any:
        return self._take("trainer.experiment_name", "verl")

    def _strategy(self) -> Any:
        offload = self._actor("fsdp_config.param_offload", False) or self._actor("fsdp_config.optimizer_offload", False)
        options: dict[str, Any] = {"cpu_offload": True} if offload else {}
        if self._take("actor_rollout_ref.model.enable_gradient_checkpointing", False):
            options["activation_checkpointing"] = True
        if (size := int(self._actor("ulysses_sequence_parallel_size", 1))) > 1:
            options["sequence_parallel_size"] = size
        if (size := int(self._actor("fsdp_config.fsdp_size", -1))) > 0:
            options["shard_size"] = size
        if not options:
            return "rlhf_fsdp"
        return {"class_path": "lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy", "init_args": options}

    def _rollout(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "group_size": int(self._take(f"{_ROLLOUT}.n")),
            "max_response_tokens": int(self._take("data.max_response_length")),
            "temperature": float(self._take(f"{_ROLLOUT}.temperature")),
        }
        path, name = self._take("custom_reward_function.path"), self._take("custom_reward_function.name")
        if path:
            options["rewards"] = [{"function": f"{path}:{name or 'compute_score'}"}]
        elif "reward_model.model.path" not in self._used:
            options["rewards"] = [{"function": "lightning_rlhf.rewards.rules.gsm8k_strict"}]
            self._notes.append(
                "rewards: verl chooses a rule by data_source; the one of GSM8K is written here, see BySource"
            )
        if samples := int(self._take(f"{_ROLLOUT}.val_kwargs.n", 0)):
            options["val_samples"] = samples
        if self._take("trainer.val_before_train", True) is False:
            options["validate_at_ends"] = False
        engine = {
            ours: self._take(f"{_ROLLOUT}.{theirs}")
            for ours, theirs in (
                ("gpu_memory_utilization", "gpu_memory_utilization"),
                ("tensor_parallel_size", "tensor_model_parallel_size"),
            )
            if self._take(f"{_ROLLOUT}.{theirs}") is not None
        }
        if self._take(f"{_ROLLOUT}.name", "vllm") != "vllm":
            self._used.discard(f"{_ROLLOUT}.name")
        elif engine:
            path = "lightning_rlhf.rollout.vllm.engine.VLLMEngine"
            if engine.get("tensor_parallel_size", 1) > 1:  # its GPUs are those of as many processes
                shared = {"engine": {"class_path": path, "init_args": engine}, "ranks": engine["tensor_parallel_size"]}
                options["engine"] = {"class_path": "lightning_rlhf.rollout.shared.SharedEngine", "init_args": shared}
            else:
                options["engine"] = {"class_path": path, "init_args": engine}
        return options


class _Supervised(_Conversion):
    """The conversion of a script of verl's SFT trainer."""

    def result(self) -> tuple[dict[str, Any], list[str]]:
        path = self._path("model.partial_pretrain") or self._path("model.path") or "set the model"
        source: Any = path
        if rank := int(self._take("model.lora_rank", 0)):
            lora: dict[str, Any] = {"rank": rank, "alpha": self._take("model.lora_alpha", 16)}
            if (targets := self._take("model.target_modules", "all-linear")) != "all-linear":
                lora["target_modules"] = targets
            source = {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": path, "lora": lora}}
        betas = [float(each) for each in self._take("optim.betas")]
        rate, decay = float(self._take("optim.lr")), float(self._take("optim.weight_decay"))
        schedule = {"kind": "cosine", "warmup_ratio": float(self._take("optim.lr_warmup_steps_ratio"))}
        model = {
            "actor": source,
            "optimizer": {"lr": rate, "weight_decay": decay, "betas": betas},
            "lr_scheduler": {"class_path": "lightning_rlhf.modules.schedules.RunSchedule", "init_args": schedule},
            "max_grad_norm": float(self._take("optim.clip_grad")),
        }
        run: dict[str, Any] = {"precision": "bf16-mixed"}
        if steps := self._take("trainer.total_training_steps"):
            run["max_steps"] = int(steps)
            self._take("trainer.total_epochs")
        else:
            run["max_epochs"] = int(self._take("trainer.total_epochs"))
        if (devices := int(self._take("trainer.n_gpus_per_node"))) > 1:
            run |= {"devices": devices, "strategy": "rlhf_fsdp"}
        self._notes.append("trainer.devices: torchrun starts the processes of verl; set the number of yours")
        self._used |= {"trainer.project_name", "trainer.logger"}
        run["default_root_dir"] = str(self._take("trainer.default_local_dir", f"runs/{self._name()}"))
        config = {
            "seed_everything": int(self._take("data.seed", 42)),
            "model": {"class_path": "lightning_rlhf.SFTModule", "init_args": model},
            "data": {"class_path": "lightning_rlhf.ConversationDataModule", "init_args": self._rows(path)},
            "trainer": run,
        }
        return config, self._left()

    def _rows(self, model: str) -> dict[str, Any]:
        data: dict[str, Any] = {"tokenizer": model, "train": self._take("data.train_files", "set the rows of training")}
        if (val := self._take("data.val_files")) is not None:
            data["val"] = val
        data["batch_size"] = int(self._take("data.train_batch_size"))
        data["max_tokens"] = int(self._take("data.max_length"))
        data["too_long"] = _TRUNCATION.get(str(self._take("data.truncation")), "bad_row")
        columns = {}
        for ours, theirs in (("prompt", "prompt"), ("completion", "response")):
            column, parts = self._take(f"data.{theirs}_key"), self._take(f"data.{theirs}_dict_keys", [])
            if column is not None:
                columns[ours] = ".".join([str(column), *map(str, parts)])
        if columns:
            data["columns"] = columns
        return data


def _value(text: str) -> Any:
    """Return the value of a text as Hydra reads it: a number, a truth value, a list, null, or the text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value) if value[:1] in "0123456789.-" else value
        except ValueError:
            return value
    return value
