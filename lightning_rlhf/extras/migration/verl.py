"""A configuration from the options of a script of verl, and the options that could not be carried over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.given import GivenOptions
from lightning_rlhf.extras.migration.parts import Counterpart, table, vllm_engine
from lightning_rlhf.extras.schema.known import SCHEDULE

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
    "algorithm.kl_ctrl.kl_coef": 0.001, "critic.cliprange_value": 0.5,
    "critic.optim.lr": 1e-5, "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.train_batch_size": 1024, "data.truncation": "error",
    "trainer.total_epochs": 30, f"{_ACTOR}.optim.lr": 1e-6, f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.ppo_mini_batch_size": 256, f"{_ACTOR}.ppo_epochs": 1, f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0, f"{_ACTOR}.entropy_coeff": 0.0, f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl", f"{_ACTOR}.grad_clip": 1.0, f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.temperature": 1.0,
}  # fmt: skip


_AS_ACTOR = ("critic", "actor_rollout_ref.ref")  # sections whose further options are those of the actor
_MOVED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.": "reward_model.", "reward.reward_kwargs.": "reward_model.reward_kwargs.",
}  # fmt: skip
# Values that change nothing.
_NEUTRAL: dict[str, Any] = {
    f"{_ROLLOUT}.top_p": 1.0, f"{_ROLLOUT}.top_k": -1, f"{_ACTOR}.kl_loss_coef": 0.0,
    "actor_rollout_ref.model.use_remove_padding": True, "critic.model.use_remove_padding": True,
}  # fmt: skip
_UNSET: tuple[Any, ...] = (None, "", [], {})
_NEVER = 1_000_000_000  # steps between validations, of which a run has none
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
        if pattern == "*" and section in _AS_ACTOR and counterpart(f"{_ACTOR}.{name}") is None:
            return None
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
        given = {_earlier_name(name): _value(text) for name, text in options.items()}
        self._options = GivenOptions({name: value for name, value in given.items() if value not in _UNSET}, defaults)
        self._carry = self._options.carry

    def _actor(self, name: str, default: Any = None) -> Any:
        return self._carry(f"{_ACTOR}.{name}", default)

    def result(self) -> tuple[dict[str, Any], list[str]]:
        module = self._module_name()
        config = {
            "seed_everything": int(self._carry("data.seed", 42)),
            "model": {"class_path": f"lightning_rlhf.{module}", "init_args": self._module(module)},
            "data": {"class_path": "lightning_rlhf.PromptDataModule", "init_args": self._data()},
            "trainer": self._run(),
        }
        return config, self._left()

    def _left(self) -> list[str]:
        """Return the notes, and a line for each option that was given and not used."""
        for name, value in _NEUTRAL.items():
            if self._options.given.get(name) == value:
                self._options.settle(name)
        known = [f"{section}.{name}" for section, options in table("verl").items() for name in options]
        return self._options.left(counterpart, "the table of verl's example scripts", known)

    def _module_name(self) -> str:
        mode = str(self._actor("policy_loss.loss_mode", "vanilla"))
        estimator = str(self._carry("algorithm.adv_estimator"))
        if mode in _LOSS_MODES and estimator == "grpo":
            return _LOSS_MODES[mode]
        if mode != "vanilla":
            self._options.leave(f"{_ACTOR}.policy_loss.loss_mode")
        if estimator not in _ESTIMATORS:
            self._options.leave("algorithm.adv_estimator")
        return _ESTIMATORS.get(estimator, "GRPOModule")

    def _module(self, module: str) -> dict[str, Any]:
        group = int(self._carry(f"{_ROLLOUT}.n"))
        options: dict[str, Any] = {"actor": self._source()}
        if module == "PPOModule":
            options["critic"] = self._path("critic.model.path") or "actor"
            decay = float(self._carry("critic.optim.weight_decay", 0.01))
            options["critic_optimizer"] = {"lr": float(self._carry("critic.optim.lr")), "weight_decay": decay}
            gamma, lam = float(self._carry("algorithm.gamma")), float(self._carry("algorithm.lam"))
            options["advantages"] = {"gamma": gamma, "gae_lambda": lam}
            if (warmup := int(self._carry("trainer.critic_warmup", 0))) > 1:
                options["critic_warmup_steps"] = warmup - 1  # verl updates the actor in the last of them
            if (change := float(self._carry("critic.cliprange_value"))) != 0.5:
                options["value_loss"] = {"clip_range": change}
            for name in ("ppo_epochs", "ppo_mini_batch_size", "grad_clip", "loss_agg_mode"):
                self._as_actor(name)
        elif int(self._carry("trainer.critic_warmup", 0)):
            self._options.leave("trainer.critic_warmup", "the algorithm has no critic")
        rate, decay = float(self._actor("optim.lr")), float(self._actor("optim.weight_decay"))
        options["optimizer"] = {"lr": rate, "weight_decay": decay}
        if schedule := self._schedule():
            options["lr_scheduler"] = schedule
        options["minibatch_size"] = int(self._actor("ppo_mini_batch_size")) * group
        options["update_epochs"] = int(self._actor("ppo_epochs"))
        options["max_grad_norm"] = float(self._actor("grad_clip"))
        if tokens := self._actor("ppo_max_token_len_per_gpu"):
            options["micro_batch_tokens"] = int(tokens)
        if entropy := float(self._actor("entropy_coeff")):
            options["ent_coef"] = entropy
        options["aggregation"] = self._aggregation()
        if module in ("PPOModule", "GRPOModule"):
            options["policy_loss"] = self._clip()
        loss = bool(self._actor("use_kl_loss", False))
        kind = _KL.get(str(self._actor("kl_loss_type")), "k3")
        options["kl_loss"] = {"coef": float(self._actor("kl_loss_coef")) if loss else 0.0, "estimator": kind}
        if self._carry("algorithm.use_kl_in_reward", False):
            kind = _KL.get(str(self._carry("algorithm.kl_penalty")), "k1")
            if self._carry("algorithm.kl_ctrl.type", "fixed") != "fixed":
                reason = "target_kl is nats per token in verl, per response in KLControl, a callback"
                self._options.leave("algorithm.kl_ctrl.type", reason)
            options["kl_reward"] = {"coef": float(self._carry("algorithm.kl_ctrl.kl_coef")), "estimator": kind}
        else:
            self._options.settle("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef")
            if module in ("PPOModule", "RLOOModule", "ReMaxModule", "ReinforcePlusPlusModule"):
                options["kl_reward"] = {"coef": 0.0}
        if module == "GRPOModule" and self._carry("algorithm.norm_adv_by_std_in_grpo", True) is False:
            options["advantages"] = {"normalize_std": False}
        if self._carry("reward_model.enable", False) and (path := self._path("reward_model.model.path")):
            options["reward_model"] = path
        return options

    def _schedule(self) -> dict[str, Any]:
        ratio = float(self._actor("optim.lr_warmup_steps_ratio", 0.0))
        is_cosine = "cosine" in (self._actor("optim.warmup_style"), self._actor("optim.lr_scheduler_type"))
        if not ratio and not is_cosine:
            return {}
        schedule: dict[str, Any] = {"kind": "cosine" if is_cosine else "constant_with_warmup", "warmup_ratio": ratio}
        if is_cosine and (least := self._actor("optim.min_lr_ratio")):
            schedule |= {"kind": "cosine_with_min_lr", "arguments": {"min_lr_rate": float(least)}}
        return {"class_path": SCHEDULE, "init_args": schedule}

    def _as_actor(self, name: str) -> None:
        """List an option of the critic that is not the actor's."""
        if self._carry(f"critic.{name}") not in (None, actor := self._actor(name)):
            self._options.leave(f"critic.{name}", f"critic and actor have one value: {actor}")

    def _aggregation(self) -> dict[str, Any]:
        mode = str(self._actor("loss_agg_mode"))
        path = "lightning_rlhf.objectives.aggregation."
        if mode == "seq-mean-token-sum-norm":
            scale = float(self._actor("loss_scale_factor") or self._carry("data.max_response_length"))
            self._options.note(f"loss_agg_mode: {mode}: a mean over responses here, their sum in a micro-batch in verl")
            return {"class_path": f"{path}SequenceMeanTokenSum", "init_args": {"scale": scale}}
        if mode not in _AGGREGATIONS:
            self._options.leave(f"{_ACTOR}.loss_agg_mode")
        return {"class_path": f"{path}{_AGGREGATIONS.get(mode, 'TokenMean')}"}

    def _clip(self) -> dict[str, float]:
        both = float(self._actor("clip_ratio"))
        sides = [f"{_ACTOR}.clip_ratio_{side}" for side in ("low", "high")]
        if both != 0.2 and self._options.given.keys().isdisjoint(sides):
            self._options.note(f"clip_ratio: {both} bounds both sides here; in verl, clip_ratio_low and _high stay 0.2")
        low, high = float(self._actor("clip_ratio_low", both)), float(self._actor("clip_ratio_high", both))
        return {"clip_range_low": low, "clip_range_high": high, "dual_clip": float(self._actor("clip_ratio_c"))}

    def _path(self, name: str) -> str:
        return str(self._carry(name, ""))

    def _source(self) -> Any:
        path = self._path("actor_rollout_ref.model.path") or "set the model"
        if path == "set the model":
            self._options.note("actor_rollout_ref.model.path: the script names no model; write it to run.yaml, twice")
        rank = int(self._carry("actor_rollout_ref.model.lora_rank", 0))
        if not rank:
            return path
        alpha = self._carry("actor_rollout_ref.model.lora_alpha", 16)
        lora: dict[str, Any] = {"rank": rank, "alpha": alpha}
        targets = self._carry("actor_rollout_ref.model.target_modules", "all-linear")
        if targets != "all-linear":
            lora["target_modules"] = targets
        return {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": path, "lora": lora}}

    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"tokenizer": self._path("actor_rollout_ref.model.path") or "set the model"}
        data["train"] = self._carry("data.train_files", "set the rows of training")
        if (val := self._carry("data.val_files")) is not None:
            data["val"] = val
        data["batch_size"] = self._prompts()
        if size := self._carry("data.val_batch_size"):
            data["val_batch_size"] = int(size)
        data["max_tokens"] = int(self._carry("data.max_prompt_length"))
        too_long = _TRUNCATION.get(str(self._carry("data.truncation")), "bad_row")
        data["too_long"] = "drop" if self._carry("data.filter_overlong_prompts", False) else too_long
        if (key := self._carry("data.prompt_key", "prompt")) != "prompt":
            data["columns"] = {"prompt": key}
        if self._carry("data.shuffle", True) is False:
            data["shuffle"] = False
        return data

    def _prompts(self) -> int:
        """Return the prompts of a batch; with groups that are filtered, those that a step may try."""
        step = int(self._carry("data.train_batch_size"))
        if not self._carry("algorithm.filter_groups.enable", False):
            return step
        self._options.settle("algorithm.filter_groups.max_num_gen_batches")
        tried = math.ceil(max(int(self._carry("data.gen_batch_size", step)), 2 * step) / step) * step
        self._options.note(
            f"filter_groups: a step tries at most {tried} prompts (batch_size); verl draws further batches"
        )
        return tried

    def _run(self) -> dict[str, Any]:
        run: dict[str, Any] = {}
        if steps := self._carry("trainer.total_training_steps"):
            run["max_steps"] = int(steps)
            self._options.settle("trainer.total_epochs")
        else:
            run["max_epochs"] = int(self._carry("trainer.total_epochs"))
        run |= {"devices": int(self._carry("trainer.n_gpus_per_node", 8)), "precision": "bf16-mixed"}
        if (nodes := int(self._carry("trainer.nnodes", 1))) > 1:
            run["num_nodes"] = nodes
        run["strategy"] = self._strategy()
        run |= self._validations()
        loggers = self._carry("trainer.logger", [])
        loggers = [loggers] if isinstance(loggers, str) else loggers
        if name := next((each for each in loggers if each in _LOGGERS), None):
            arguments = {"project": str(self._carry("trainer.project_name", "")), "name": str(self._name())}
            run["logger"] = {"class_path": _LOGGERS[name], "init_args": arguments if name == "wandb" else {}}
            self._options.settle("trainer.project_name")
        else:
            self._options.settle("trainer.project_name", "trainer.logger")
        saves: dict[str, int] = {}
        if (frequency := int(self._carry("trainer.save_freq", -1))) > 0:
            saves["every_n_steps"] = frequency
        if keep := self._carry("trainer.max_actor_ckpt_to_keep"):
            saves["keep_last"] = int(keep)
        callbacks = [
            {"class_path": "lightning_rlhf.callbacks.RolloutLoop", "init_args": self._rollout()},
            {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": saves},
        ]
        directory = self._carry("trainer.default_local_dir", f"runs/{self._name()}")
        return {**run, "callbacks": callbacks, "default_root_dir": str(directory)}

    def _validations(self) -> dict[str, int]:
        """Return when the Trainer validates; the loop does before the first and after the last step."""
        if (frequency := int(self._carry("trainer.test_freq", -1))) > 0:
            return {"val_check_interval": frequency}
        if self._carry("trainer.val_before_train", True):
            if "data.val_files" in self._options.given:
                self._options.note("trainer.test_freq: -1: the model is validated before and after the run")
            return {"val_check_interval": _NEVER}
        return {"limit_val_batches": 0}

    def _name(self) -> Any:
        return self._carry("trainer.experiment_name", "verl")

    def _strategy(self) -> Any:
        weights, moments = (self._actor(f"fsdp_config.{each}_offload", False) for each in ("param", "optimizer"))
        if moments and not weights:
            self._options.note(f"{_ACTOR}.fsdp_config.optimizer_offload: cpu_offload keeps the weights there as well")
        options: dict[str, Any] = {"cpu_offload": True} if weights or moments else {}
        if self._carry("actor_rollout_ref.model.enable_gradient_checkpointing", False):
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
            "group_size": int(self._carry(f"{_ROLLOUT}.n")),
            "max_response_tokens": int(self._carry("data.max_response_length")),
            "temperature": float(self._carry(f"{_ROLLOUT}.temperature")),
        }
        if rewards := self._rewards():
            options["rewards"] = rewards
        if self._carry("algorithm.filter_groups.enable", False):
            options["dynamic_sampling"] = {"prompts_per_step": int(self._carry("data.train_batch_size"))}
            if (metric := self._carry("algorithm.filter_groups.metric", "score")) not in ("score", "seq_reward"):
                self._options.leave("algorithm.filter_groups.metric", f"the sum of the rewards decides, not {metric}")
        if samples := int(self._carry(f"{_ROLLOUT}.val_kwargs.n", 0)):
            options["val_samples"] = samples
        if self._carry("trainer.val_before_train", True) is False:
            options["validate_at_ends"] = False
            if int(self._carry("trainer.test_freq", -1)) > 0:
                self._options.note("trainer.val_before_train: the last step is only validated where test_freq is due")
        engine = {
            ours: self._carry(f"{_ROLLOUT}.{theirs}")
            for ours, theirs in (
                ("gpu_memory_utilization", "gpu_memory_utilization"),
                ("tensor_parallel_size", "tensor_model_parallel_size"),
            )
            if self._carry(f"{_ROLLOUT}.{theirs}") is not None
        }
        if self._carry(f"{_ROLLOUT}.name", "vllm") != "vllm":
            self._options.leave(f"{_ROLLOUT}.name")
        elif engine:
            options["engine"] = vllm_engine(engine)
        return options

    def _rewards(self) -> list[dict[str, Any]]:
        rewards: list[dict[str, Any]] = []
        path, name = self._carry("custom_reward_function.path"), self._carry("custom_reward_function.name")
        has_model = bool(self._carry("reward_model.enable", False) and self._path("reward_model.model.path"))
        if path:
            rewards.append({"function": f"{path}:{name or 'compute_score'}"})
            self._options.note(f"custom_reward_function: copy {path} to where the path in run.yaml leads")
            if has_model:
                self._options.note("reward_model and custom_reward_function are added up here; verl takes one of them")
        elif not has_model:
            rewards.append({"function": "lightning_rlhf.rewards.rules.gsm8k_strict"})
            self._options.note(
                "rewards: verl chooses a rule by data_source; the one of GSM8K is written here, see BySource"
            )
        for place in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
            if self._carry(f"{place}.enable", False):
                longest = self._carry(
                    "reward_model.reward_kwargs.max_resp_len", self._carry("data.max_response_length")
                )
                sizes = {"max_tokens": int(longest), "buffer_tokens": int(self._carry(f"{place}.len"))}
                penalty = {"class_path": "lightning_rlhf.rewards.shaping.OverlongPenalty", "init_args": sizes}
                rewards.append({"function": penalty, "weight": float(self._carry(f"{place}.penalty_factor", 1.0))})
                self._options.settle(f"{place}.log")
        return rewards


class _Supervised(_Conversion):
    """The conversion of a script of verl's SFT trainer."""

    def result(self) -> tuple[dict[str, Any], list[str]]:
        path = self._path("model.partial_pretrain") or self._path("model.path") or "set the model"
        source: Any = path
        if rank := int(self._carry("model.lora_rank", 0)):
            lora: dict[str, Any] = {"rank": rank, "alpha": self._carry("model.lora_alpha", 16)}
            if (targets := self._carry("model.target_modules", "all-linear")) != "all-linear":
                lora["target_modules"] = targets
            source = {"class_path": "lightning_rlhf.Pretrained", "init_args": {"path": path, "lora": lora}}
        betas = [float(each) for each in self._carry("optim.betas")]
        rate, decay = float(self._carry("optim.lr")), float(self._carry("optim.weight_decay"))
        schedule = {"kind": "cosine", "warmup_ratio": float(self._carry("optim.lr_warmup_steps_ratio"))}
        model = {
            "actor": source,
            "optimizer": {"lr": rate, "weight_decay": decay, "betas": betas},
            "lr_scheduler": {"class_path": "lightning_rlhf.modules.schedules.RunSchedule", "init_args": schedule},
            "max_grad_norm": float(self._carry("optim.clip_grad")),
        }
        run: dict[str, Any] = {"precision": "bf16-mixed"}
        if steps := self._carry("trainer.total_training_steps"):
            run["max_steps"] = int(steps)
            self._options.settle("trainer.total_epochs")
        else:
            run["max_epochs"] = int(self._carry("trainer.total_epochs"))
        if (devices := int(self._carry("trainer.n_gpus_per_node"))) > 1:
            run |= {"devices": devices, "strategy": "rlhf_fsdp"}
        self._options.note("trainer.devices: torchrun starts the processes of verl; set the number of yours")
        self._options.settle("trainer.project_name", "trainer.logger")
        run["default_root_dir"] = str(self._carry("trainer.default_local_dir", f"runs/{self._name()}"))
        config = {
            "seed_everything": int(self._carry("data.seed", 42)),
            "model": {"class_path": "lightning_rlhf.SFTModule", "init_args": model},
            "data": {"class_path": "lightning_rlhf.ConversationDataModule", "init_args": self._rows(path)},
            "trainer": run,
        }
        return config, self._left()

    def _rows(self, model: str) -> dict[str, Any]:
        data: dict[str, Any] = {
            "tokenizer": model,
            "train": self._carry("data.train_files", "set the rows of training"),
        }
        if (val := self._carry("data.val_files")) is not None:
            data["val"] = val
        data["batch_size"] = int(self._carry("data.train_batch_size"))
        data["max_tokens"] = int(self._carry("data.max_length"))
        data["too_long"] = _TRUNCATION.get(str(self._carry("data.truncation")), "bad_row")
        columns = {}
        if "data.prompt_key" in self._options.given:
            data["as_messages"] = True  # verl renders the texts with the chat template
        for ours, theirs in (("prompt", "prompt"), ("completion", "response")):
            column, parts = self._carry(f"data.{theirs}_key"), self._carry(f"data.{theirs}_dict_keys", [])
            if column is not None:
                columns[ours] = ".".join([str(column), *map(str, parts)])
        if columns:
            data["columns"] = columns
        return data


def _earlier_name(name: str) -> str:
    """Return the name that an option had before verl moved the rewards to a section ``reward``."""
    for later, earlier in _MOVED.items():
        if name.startswith(later):
            return earlier + name.removeprefix(later)
    return name


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
