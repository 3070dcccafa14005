"""A configuration from the options of a script of verl, and the options that could not be carried over."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.given import GivenOptions
from lightning_rlhf.extras.migration.parts import Counterpart, documents, table, vllm_engine
from lightning_rlhf.extras.schema.known import SCHEDULE

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_OBJECTIVES = "lightning_rlhf.objectives"
_FSDP = "lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy"
_SINGLE = "lightning_rlhf.strategies.single.RLHFSingleDeviceStrategy"
_NO_MODEL = "set the model"
_AS_ACTOR = ("critic", "actor_rollout_ref.ref")  # sections whose further options are those of the actor
_TOP = "without a section"  # of options whose names have no dot
# Values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    f"{_ACTOR}.kl_loss_coef": (0.0,), f"{_ACTOR}.strategy": ("fsdp2",), f"{_ROLLOUT}.val_kwargs.temperature": (1.0,),
    "model.strategy": ("fsdp", "fsdp2"), "trainer.resume_mode": ("disable",), "model_engine": ("dp", "fsdp", "fsdp2"),
    "engine": ("fsdp",), "model.use_remove_padding": (True,), "use_remove_padding": (True,),
}  # fmt: skip
_UNSET: tuple[Any, ...] = (None, "", [], {})
_NEVER = 1_000_000_000  # steps between validations, of which a run has none


def counterpart(option: str) -> Counterpart | None:
    """Return what an option of verl is here; None for an unknown option."""
    option = option if "." in option else f"{_TOP}.{option}"
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
        return _Conversion(options, "main_ppo").result()
    if "model.partial_pretrain" in options:
        return _Supervised(options, "fsdp_sft_trainer").result()
    if "model.path" in options or "optim.lr" in options:
        return _Supervised(options, "sft_trainer").result()
    raise UsageError(
        "the script has no options of verl's main_ppo or of its SFT trainer, such as actor_rollout_ref.model.path or "
        "model.partial_pretrain"
    )


class _Conversion:
    """The conversion of one script.

    Reading an option by ``_carry`` marks it as carried over, with the value of verl's default if the script does not
    set it; every other option of the script is listed. So an option must be read wherever, and only where, its value
    counts.
    """

    def __init__(self, options: Mapping[str, str], trainer: str) -> None:
        self._names: dict[str, str] = {}  # in the script, of options that the table has by another name
        given = {}
        for option, text in options.items():
            for name, value in _values(option, _value(text)):
                if value not in _UNSET:
                    given[_table_name(name)] = value
                    self._names[_table_name(name)] = name
        self._options = GivenOptions(given, documents("verl")[1][trainer])
        self._carry = self._options.carry

    def _actor(self, name: str, default: Any = None) -> Any:
        return self._carry(f"{_ACTOR}.{name}", default)

    def _plain(self, place: str, section: str = "") -> dict[str, Any]:
        """Return the options of a place whose values are the same here.

        Args:
            place: their place in the configuration.
            section: beginning of their names in verl.
        """
        options = {}
        for ours, (theirs, *without) in documents("verl")[8][place].items():
            value = self._carry(section + theirs)
            if value is None or value in without:
                continue
            if isinstance(value, str) and without and not isinstance(without[0], str):
                self._options.leave(section + theirs)  # such as after_each_epoch in place of a number
            else:
                options[ours] = value
        return options

    def _word(self, kind: str, name: str) -> str:
        """Return what the value of an option is here; that of its default, and the option is listed, if none is."""
        words: dict[str, str] = documents("verl")[5][kind]
        if (word := str(self._carry(name))) in words:
            return words[word]
        self._options.leave(name)
        return words[str(self._options.defaults[name])]

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
        """Return the notes, and a line for each option that was given and not used, by its name in the script."""
        for name, values in _NEUTRAL.items():
            if self._options.given.get(name) in values:
                self._options.settle(name)
        sections = table("verl").items()
        known = [name if section == _TOP else f"{section}.{name}" for section, options in sections for name in options]
        left = self._options.left(counterpart, "the table of verl's example scripts", known)
        lines = (line.partition(": ") for line in left)
        return [f"{self._names.get(name, name)}{colon}{rest}" for name, colon, rest in lines]

    def _module_name(self) -> str:
        mode, estimator = str(self._actor("policy_loss.loss_mode")), str(self._carry("algorithm.adv_estimator"))
        self._loss = documents("verl")[4].get(mode, documents("verl")[4]["vanilla"])
        self._estimator = {"name": estimator, **documents("verl")[3].get(estimator, {"module": "GRPOModule"})}
        if mode not in documents("verl")[4]:
            self._options.leave(f"{_ACTOR}.policy_loss.loss_mode")
        if estimator not in documents("verl")[3]:
            self._options.leave("algorithm.adv_estimator")
        return str(self._loss.get("module", "GRPOModule") if estimator == "grpo" else self._estimator["module"])

    def _module(self, module: str) -> dict[str, Any]:
        options: dict[str, Any] = {"actor": self._source(), **(self._critic() if module == "PPOModule" else {})}
        if module != "PPOModule":
            self._options.settle(*(name for name in self._options.given if name.startswith("critic.")))
            if int(self._carry("trainer.critic_warmup")):
                self._options.leave("trainer.critic_warmup", "the algorithm has no critic")
        options |= {"optimizer": self._plain("optimizer", f"{_ACTOR}.optim."), **self._schedule(f"{_ACTOR}.optim")}
        options["minibatch_size"] = int(self._actor("ppo_mini_batch_size")) * int(self._carry(f"{_ROLLOUT}.n"))
        if tokens := self._actor("ppo_max_token_len_per_gpu"):
            options["micro_batch_tokens"] = int(tokens) * int(self._actor("ulysses_sequence_parallel_size"))
        options |= {**self._plain("module"), "aggregation": self._aggregation(), "policy_loss": self._policy_loss()}
        options |= self._kl(module) | self._advantages(module)
        if correction := self._plain("correction"):
            options["correction"] = {"bypass": True} if "bypass" in correction else correction
        if self._carry("reward_model.enable", False) and (path := self._path("reward_model.model.path")):
            options["reward_model"] = path
            self._options.note(
                f"reward_model: {path} must have the policy's tokenizer here, else write a LearnedReward"
            )
        return options

    def _critic(self) -> dict[str, Any]:
        options: dict[str, Any] = {"critic": self._path("critic.model.path") or "actor"}
        options["critic_optimizer"] = self._plain("optimizer", "critic.optim.")
        options |= {f"critic_{name}": value for name, value in self._schedule("critic.optim").items()}
        if (warmup := int(self._carry("trainer.critic_warmup"))) > 1:
            options["critic_warmup_steps"] = warmup - 1  # verl updates the actor in the last of them
        if (change := float(self._carry("critic.cliprange_value"))) != 0.5:
            options["value_loss"] = {"clip_range": change}
        for name in ("ppo_epochs", "ppo_mini_batch_size", "grad_clip", "loss_agg_mode"):
            if self._carry(f"critic.{name}") not in (None, actor := self._actor(name)):
                self._options.leave(f"critic.{name}", f"critic and actor have one value: {actor}")
        return options

    def _advantages(self, module: str) -> dict[str, Any]:
        estimator, path = self._estimator["name"], self._estimator.get("advantages")
        arguments: dict[str, Any] = {}
        if module == "PPOModule":
            gamma, lam = float(self._carry("algorithm.gamma")), float(self._carry("algorithm.lam"))
            return {"advantages": {"gamma": gamma, "gae_lambda": lam}}
        if estimator.startswith("grpo") and self._carry("algorithm.norm_adv_by_std_in_grpo") is False:
            path, arguments = path or f"{_OBJECTIVES}.group_advantages.GRPO", {"normalize_std": False}
        elif estimator == "reinforce_plus_plus" and (gamma := float(self._carry("algorithm.gamma"))) != 1.0:
            path, arguments = f"{_OBJECTIVES}.return_advantages.ReinforcePlusPlus", {"gamma": gamma}
        return {"advantages": _of_class(path, arguments)} if path else {}

    def _kl(self, module: str) -> dict[str, Any]:
        coef = float(self._actor("kl_loss_coef")) if self._actor("use_kl_loss", False) else 0.0
        options: dict[str, Any] = {"kl_loss": {"coef": coef, "estimator": self._word("kl", f"{_ACTOR}.kl_loss_type")}}
        coef, kind = float(self._carry("algorithm.kl_ctrl.kl_coef")), self._word("kl", "algorithm.kl_penalty")
        if self._carry("algorithm.use_kl_in_reward", False):
            if self._carry("algorithm.kl_ctrl.type") != "fixed":
                reason = "target_kl is nats per token in verl, per response in KLControl, a callback"
                self._options.leave("algorithm.kl_ctrl.type", reason)
            options["kl_reward"] = {"coef": coef, "estimator": kind}
        elif module in ("PPOModule", "RLOOModule", "ReMaxModule", "ReinforcePlusPlusModule"):
            options["kl_reward"] = {"coef": 0.0}
        return options

    def _schedule(self, section: str) -> dict[str, Any]:
        ratio = float(self._carry(f"{section}.lr_warmup_steps_ratio"))
        kind = self._word("schedule", f"{section}.lr_scheduler_type")
        total = self._carry("trainer.total_training_steps")
        if (steps := int(self._carry(f"{section}.lr_warmup_steps"))) > 0:
            ratio = steps / int(total) if total else 0.0
            if not total:
                self._options.leave(f"{section}.lr_warmup_steps", "warmup_ratio is a fraction of the run's steps")
        if not ratio and kind == "constant_with_warmup":
            return {}
        schedule: dict[str, Any] = {"kind": kind, "warmup_ratio": ratio}
        if kind == "cosine" and (least := self._carry(f"{section}.min_lr_ratio")):
            schedule |= {"kind": "cosine_with_min_lr", "arguments": {"min_lr_rate": float(least)}}
        return {"lr_scheduler": _of_class(SCHEDULE, schedule)}

    def _aggregation(self) -> dict[str, Any]:
        name, path = f"{_ACTOR}.loss_agg_mode", f"{_OBJECTIVES}.aggregation."
        mode, fixed = self._carry(name), self._loss.get("aggregation")
        if fixed and mode not in (None, fixed):
            self._options.leave(name, f"verl computes {fixed} with this loss_mode")
        if mode is None and self._loss.get("module") == "GSPOModule":
            fixed = "seq-mean-token-mean"
            self._options.note(f"loss_agg_mode: {fixed}, as in verl until August 2026; its default is token-mean since")
        mode = str(fixed or mode or "token-mean")
        if mode == "seq-mean-token-sum-norm":
            scale = float(self._actor("loss_scale_factor") or self._carry("data.max_response_length"))
            self._options.note(f"loss_agg_mode: {mode}: a mean over responses here, their sum in a micro-batch in verl")
            return _of_class(f"{path}SequenceMeanTokenSum", {"scale": scale})
        words = documents("verl")[5]["aggregation"]
        if mode not in words:
            self._options.leave(name)
        return {"class_path": path + words.get(mode, "TokenMean")}

    def _policy_loss(self) -> dict[str, Any]:
        both, sides = float(self._actor("clip_ratio")), ("clip_ratio_low", "clip_ratio_high")
        if both != 0.2 and self._options.given.keys().isdisjoint(f"{_ACTOR}.{side}" for side in sides):
            self._options.note(f"clip_ratio: {both} bounds both sides here; in verl, clip_ratio_low and _high stay 0.2")
        arguments = {
            ours: float(self._actor(theirs, both if theirs in sides else None))
            for ours, theirs in self._loss["options"].items()
        }
        if arguments.get("clip_range_low", 0.0) > 1.0 and self._loss.get("module") != "GMPOModule":
            arguments["clip_range_low"] = 1.0  # ratios are at least 0
        for name in ("clip_ratio_c", *sides):  # which other losses do not read
            self._options.settle(f"{_ACTOR}.{name}")
        return _of_class(self._loss["class_path"], arguments)

    def _path(self, name: str) -> str:
        return str(self._carry(name, ""))

    def _source(self) -> Any:
        source = self._pretrained(self._path(f"{_MODEL}.path"), _MODEL)
        seen = {"data.image_key", f"{_ACTOR}.freeze_vision_tower"} & self._options.given.keys()
        if seen and not self._actor("freeze_vision_tower", False) and isinstance(source, str):
            return _of_class("lightning_rlhf.Pretrained", {"path": source, "train_vision": True})  # verl's default
        return source

    def _pretrained(self, path: str, section: str) -> Any:
        """Return the source of the trained model, with its adapters."""
        if not path:
            self._options.note(f"{section}.path: the script names no model; write it to run.yaml, twice")
        source: dict[str, Any] = {"path": path or _NO_MODEL}
        lora = self._plain("lora", f"{section}.")
        if adapter := self._carry(f"{section}.lora_adapter_path"):
            source["adapter"] = adapter  # with its own rank
        elif lora.get("rank"):
            source["lora"] = {"alpha": 16, **lora}
        return _of_class("lightning_rlhf.Pretrained", source) if len(source) > 1 else source["path"]

    def _data(self) -> dict[str, Any]:
        tokenizer = self._path(f"{_MODEL}.tokenizer_path") or self._path(f"{_MODEL}.path")
        data = self._rows(tokenizer, "data") | {"batch_size": self._prompts()}
        if self._carry("data.filter_overlong_prompts", False):
            data["too_long"] = "drop"
        columns = {
            ours: self._carry(f"data.{theirs}_key") for ours, theirs in (("prompt", "prompt"), ("images", "image"))
        }
        if columns := {ours: column for ours, column in columns.items() if column != ours}:
            data["columns"] = columns
        return data

    def _rows(self, tokenizer: str, place: str) -> dict[str, Any]:
        """Return the options of the data that all trainers have."""
        train = self._carry("data.train_files", "set the rows of training")
        data = {"tokenizer": tokenizer or _NO_MODEL, "train": train, **self._plain(place)}
        data["too_long"] = self._word("truncation", "data.truncation")
        if variables := self._within("data.apply_chat_template_kwargs."):
            data["chat_template_kwargs"] = variables
        return data

    def _within(self, section: str) -> dict[str, Any]:
        """Return the options of a section whose names are the script's own."""
        names = [name for name in self._options.given if name.startswith(section)]
        return {name.removeprefix(section): self._carry(name) for name in names}

    def _step(self) -> int:
        """Return the prompts that a step trains on."""
        if step := int(self._carry("data.train_batch_size")):
            return step
        return int(self._actor("ppo_mini_batch_size")) * int(self._carry("async_training.require_batches", 1))

    def _prompts(self) -> int:
        """Return the prompts of a batch; with groups that are filtered, those that a step may try."""
        step = self._step()
        if not self._carry("data.train_batch_size"):
            self._options.note(f"data.train_batch_size: 0: a step has the {step} prompts of an update of verl")
        if not self._carry("algorithm.filter_groups.enable", False):
            return step
        self._options.settle("algorithm.filter_groups.max_num_gen_batches")
        tried = math.ceil(max(int(self._carry("data.gen_batch_size", step)), 2 * step) / step) * step
        self._options.note(
            f"filter_groups: a step tries at most {tried} prompts (batch_size); verl draws further batches"
        )
        return tried

    def _run(self) -> dict[str, Any]:
        saves = self._plain("checkpoint")
        if self._carry("trainer.max_critic_ckpt_to_keep") != saves.get("keep_last"):
            self._options.leave("trainer.max_critic_ckpt_to_keep")
        weights, moments = (self._actor(f"fsdp_config.{each}_offload", False) for each in ("param", "optimizer"))
        strategy = self._plain("strategy") | ({"cpu_offload": True} if moments else {})
        if moments and not weights:
            self._options.note(f"{_ACTOR}.fsdp_config.optimizer_offload: cpu_offload keeps the weights there as well")
        run = {"strategy": _of_class(_FSDP, strategy) if strategy else "rlhf_fsdp", **self._validations()}
        return self._trainer(run, {"RolloutLoop": self._rollout(), "RunCheckpoint": saves})

    def _trainer(self, further: Mapping[str, Any], callbacks: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the Trainer: those that all trainers of verl have, and further ones."""
        name = self._carry("trainer.experiment_name", "verl")
        directory = str(self._carry("trainer.default_local_dir", f"runs/{name}"))
        entries = [
            {"class_path": f"lightning_rlhf.callbacks.{callback}", "init_args": options}
            for callback, options in callbacks.items()
        ]
        run = {**self._plain("trainer"), "precision": "bf16-mixed", **further, **self._loggers(directory)}
        return {**run, "callbacks": entries, "default_root_dir": directory}

    def _loggers(self, directory: str) -> dict[str, Any]:
        """Return the loggers; TensorBoard is named only beside others, because each run has it by default."""
        known, names = documents("verl")[6], self._carry("trainer.logger", [])
        names = [name for name in (names if isinstance(names, list) else [names]) if name != "console"]
        if unknown := [str(name) for name in names if name not in known]:
            self._options.leave("trainer.logger", f"without {', '.join(unknown)}: set logger to one of Lightning's")
        self._options.settle("trainer.project_name", "trainer.experiment_name")
        loggers = []
        for name in [name for name in names if name in known]:
            arguments = {"save_dir": directory} if name == "tensorboard" else {}
            options = {
                ours: str(self._carry(theirs, "verl")) for ours, theirs in known[name].get("options", {}).items()
            }
            loggers.append(_of_class(known[name]["class_path"], known[name].get("init_args", {}) | arguments | options))
        if not loggers or names == ["tensorboard"]:
            return {}
        return {"logger": loggers if len(loggers) > 1 else loggers[0]}

    def _validations(self) -> dict[str, Any]:
        """Return when the Trainer validates; the loop does before the first and after the last step."""
        at_start, interval = self._carry("trainer.val_before_train"), self._plain("validation")
        if interval and not at_start:
            self._options.note("trainer.val_before_train: the last step is only validated where test_freq is due")
        if not interval and at_start and "data.val_files" in self._options.given:
            self._options.note("trainer.test_freq: -1: the model is validated before and after the run")
        return interval or ({"val_check_interval": _NEVER} if at_start else {"limit_val_batches": 0})

    def _rollout(self) -> dict[str, Any]:
        options = self._plain("rollout")
        if rewards := self._rewards():
            options["rewards"] = rewards
        if self._carry("algorithm.filter_groups.enable", False):
            options["dynamic_sampling"] = {"prompts_per_step": self._step()}
            if (metric := self._carry("algorithm.filter_groups.metric", "score")) not in ("score", "seq_reward"):
                self._options.leave("algorithm.filter_groups.metric", f"the sum of the rewards decides, not {metric}")
        if engine := self._engine():
            options["engine"] = engine
        return options

    def _engine(self) -> Any:
        """Return the engine; None lets the machine decide."""
        if (name := self._carry(f"{_ROLLOUT}.name")) == "hf":
            return "transformers"
        if name != "vllm":
            self._options.leave(f"{_ROLLOUT}.name", f"VLLMEngine takes the place of {name}")
        longest = int(self._carry("data.max_prompt_length")) + int(self._carry("data.max_response_length"))
        if int(self._carry(f"{_ROLLOUT}.max_model_len", longest)) < longest:
            self._options.leave(f"{_ROLLOUT}.max_model_len", f"prompt and response may have {longest} tokens here")
        engine = self._plain("engine")
        if arguments := self._plain("arguments"):
            engine["arguments"] = arguments
        return vllm_engine(engine) if engine.keys() - {"sleep_while_learning"} else None

    def _rewards(self) -> list[dict[str, Any]]:
        rewards: list[dict[str, Any]] = []
        path, name = self._carry("custom_reward_function.path"), self._carry("custom_reward_function.name")
        has_model = bool(self._carry("reward_model.enable", False) and self._path("reward_model.model.path"))
        manager, managers = str(self._carry("reward_model.reward_manager")), documents("verl")[5]["manager"]
        if needs := managers.get(manager, "write what it computes into the function of rewards"):
            self._options.leave("reward_model.reward_manager", needs)
        if path:
            reward: dict[str, Any] = {"function": f"{path}:{name or 'compute_score'}"}
            if arguments := self._within("custom_reward_function.reward_kwargs."):
                reward["arguments"] = arguments
            rewards.append(reward | ({"timeout_s": 300.0, "on_error": "zero"} if manager == "prime" else {}))
            self._options.note(f"custom_reward_function: copy {path} to where the path in run.yaml leads")
            if has_model:
                self._options.note("reward_model and custom_reward_function are added up here; verl takes one of them")
        elif not has_model:
            rewards.append({"function": self._rule()})
        for place in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
            self._options.settle(*(f"{place}.{each}" for each in ("len", "penalty_factor", "log")))
            if self._carry(f"{place}.enable", False):
                rewards.append(self._overlong(place))
                if manager != "dapo":
                    self._options.note(f"{place}: a reward here; in verl the reward manager {manager} does not read it")
        return rewards

    def _rule(self) -> Any:
        """Return the reward of a script without a function."""
        files = self._carry("data.train_files", "")
        if all("gsm8k" in str(file).lower() for file in (files if isinstance(files, list) else [files])):
            self._options.note(
                "rewards: verl chooses a rule by data_source; that of GSM8K is written here, see BySource"
            )
            return documents("verl")[7]["openai/gsm8k"]
        self._options.note(
            "rewards: verl chooses a rule by data_source; BySource has those of GSM8K, MATH, AIME and search (pip "
            "install 'lightning-rlhf[math]'): add those of your sources"
        )
        return _of_class("lightning_rlhf.extras.rewards.sources.BySource", {"functions": documents("verl")[7]})

    def _overlong(self, place: str) -> dict[str, Any]:
        """Return the reward that responses lose near the length limit."""
        longest = self._carry("reward_model.reward_kwargs.max_resp_len", self._carry("data.max_response_length"))
        sizes = {"max_tokens": int(longest), "buffer_tokens": int(self._carry(f"{place}.len"))}
        penalty = _of_class("lightning_rlhf.rewards.shaping.OverlongPenalty", sizes)
        return {"function": penalty, "weight": float(self._carry(f"{place}.penalty_factor", 1.0))}


class _Supervised(_Conversion):
    """The conversion of a script of verl's SFT trainer."""

    def result(self) -> tuple[dict[str, Any], list[str]]:
        path = self._path("model.partial_pretrain") or self._path("model.path")
        model = {"actor": self._pretrained(path, "model"), "optimizer": self._plain("optimizer", "optim.")}
        model |= self._schedule("optim") | {"max_grad_norm": float(self._carry("optim.clip_grad"))}
        if tokens := self._carry("data.max_token_len_per_gpu"):
            model["micro_batch_tokens"] = int(tokens) * int(self._carry("ulysses_sequence_parallel_size"))
        if "trainer.n_gpus_per_node" not in self._options.given:
            self._options.note("trainer.devices: torchrun starts the processes of verl; set the number of yours")
        processes = (self._carry("trainer.n_gpus_per_node"), self._carry("trainer.nnodes"))
        strategy, run = self._plain("sft strategy"), self._plain("validation")
        if processes != (1, 1) or strategy.keys() - {"activation_checkpointing"}:
            run["strategy"] = _of_class(_FSDP, strategy) if strategy else "rlhf_fsdp"
        elif strategy:
            run["strategy"] = _of_class(_SINGLE, strategy)
        config = {
            "seed_everything": int(self._carry("trainer.seed")),
            "model": {"class_path": "lightning_rlhf.SFTModule", "init_args": model},
            "data": {"class_path": "lightning_rlhf.ConversationDataModule", "init_args": self._texts(path)},
            "trainer": self._trainer(run, {"RunCheckpoint": self._plain("sft checkpoint")}),
        }
        return config, self._left()

    def _texts(self, model: str) -> dict[str, Any]:
        data = self._rows(model, "sft data")
        if (messages := self._carry("data.messages_key")) or self._carry("data.multiturn.enable", False):
            return data | ({} if messages in (None, "messages") else {"columns": {"messages": messages}})
        columns = {}
        for ours, theirs in (("prompt", "prompt"), ("completion", "response")):
            parts = [self._carry(f"data.{theirs}_key"), *self._carry(f"data.{theirs}_dict_keys", [])]
            columns[ours] = ".".join(map(str, parts))
        return data | {"as_messages": True, "columns": columns}  # verl renders the texts with the chat template


def _of_class(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_path": path, "init_args": dict(arguments)} if arguments else {"class_path": path}


def _table_name(name: str) -> str:
    """Return the name by which the table has an option; verl moved some, and reads others in two places."""
    for given, known in documents("verl")[2].items():
        if name == given or (given.endswith(".") and name.startswith(given)):
            return str(known) + name.removeprefix(given)
    return name


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an option with its value; those of a mapping ``{a: 1, b: 2}`` are the options ``name.a`` and ``name.b``."""
    if isinstance(value, dict):
        for part, inner in value.items():
            yield from _values(f"{name}.{part}", inner)
    else:
        yield name, value


def _value(text: str) -> Any:
    """Return the value of a text as Hydra reads it: a number, a truth value, a list, a mapping, null, or the text."""
    if text in ("", "null", "None"):
        return None
    for number in (int, float):
        try:
            if text[0] in "0123456789.-":
                return number(text)
        except ValueError:
            continue
    if text[0] == "{":
        text = re.sub(r"([{,]\s*[\w.]+):(?=\S)", r"\1: ", text)  # YAML needs a space there
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    is_plain = not isinstance(value, bool | list) and text[0] not in "{'\""  # dates and times stay texts, too
    return text if is_plain else value
