"""A configuration from the options of a trainer of TRL, and the options that could not be carried over."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.given import GivenOptions
from lightning_rlhf.extras.migration.parts import Counterpart, rows_of, table, trl_defaults, trl_loggers
from lightning_rlhf.extras.migration.trl_losses import LOSSES, grpo_loss, optimizer, schedule
from lightning_rlhf.extras.migration.trl_model import NO_MODEL, model_source
from lightning_rlhf.extras.migration.trl_rollout import rollout

# Sections of the table in which the options of a trainer are looked up, its own first. The table has an option once, in
# the first of TRL's classes that has it, so the later ones need the sections of those before them.
_COMMON = (
    "ModelConfig", "ScriptArguments", "DatasetMixtureConfig", "TrainingArguments", "Earlier and further names",
)  # fmt: skip
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
    "grpo": {"num_generations", "num_iterations", "steps_per_generation", "reward_funcs"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "discopop_tau", "rpo_alpha"},
    "sft": {"max_seq_length", "packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"},
}
_SHARED = {"rloo": _MARKS["grpo"], "kto": {"precompute_ref_log_probs"}}  # marks of others that a trainer has as well
_NULLS = {  # what null stands for, where it is not the default
    "vllm_importance_sampling_clip_max": math.inf,
    "shuffle_dataset": False,
    "max_grad_norm": 0.0,
}
_LISTS = ("report_to", "reward_funcs", "reward_weights", "datasets")  # options of which one value is a list of it
_ANY_LENGTH = 32_768  # longest text of a run without a limit
_MODULES = {
    "sft": ("SFTModule", "ConversationDataModule"),
    "dpo": ("DPOModule", "PreferenceDataModule"),
    "kto": ("KTOModule", "UnpairedDataModule"),
    "reward": ("RewardModule", "PreferenceDataModule"),
    "orpo": ("DPOModule", "PreferenceDataModule"),
    "cpo": ("DPOModule", "PreferenceDataModule"),
    "rloo": ("RLOOModule", "PromptDataModule"),
    "grpo": ("GRPOModule", "PromptDataModule"),
}
_STRATEGIES = {
    "single": "lightning_rlhf.strategies.single.RLHFSingleDeviceStrategy",
    "ddp": "lightning_rlhf.strategies.ddp.RLHFDDPStrategy",
    "fsdp": "lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy",
}


def counterpart(trainer: str, option: str) -> Counterpart | None:
    """Return what an option of a trainer of TRL is here; None for an unknown option."""
    sections = (table("trl").get(section, {}) for section in SECTIONS_OF[trainer])
    return next((options[option] for options in sections if option in options), None)


def defaults_of(trainer: str) -> dict[str, Any]:
    """Return TRL's defaults of the options of a trainer; those of its own class count."""
    sections = (trl_defaults().get(section, {}) for section in reversed(SECTIONS_OF[trainer]))
    return {name: value for options in sections for name, value in options.items()}


def read_options(file: Path) -> dict[str, Any]:
    """Return the options of a JSON or YAML file: ``trainer_config.json``, or the file of ``trl grpo --config``.

    Raises:
        UsageError: the file cannot be read, or is not a mapping.
    """
    is_program = file.suffix in (".py", ".sh")
    load: Callable[[str], Any] = str if is_program else json.loads if file.suffix == ".json" else yaml.safe_load
    try:
        options = load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if is_program:
        raise UsageError(_advice_for_program(file, options))
    if not isinstance(options, dict):
        raise UsageError(f"{file} must have options with values, got {type(options).__name__}")
    return options


def _advice_for_program(file: Path, text: str) -> str:
    is_verl = re.search(r"\bverl\b", text)
    advice = "for a script of verl, use --from-verl" if is_verl else "write its options to a YAML file"
    return f"{file} is a program, and --from-trl reads a file of options, YAML or JSON: {advice}"


def trainer_of(options: Mapping[str, Any]) -> str:
    """Return the trainer whose options these are: ``grpo``, ``sft``, ...

    Raises:
        UsageError: no option belongs to one trainer alone.
    """
    for trainer, marks in _MARKS.items():
        if not marks.isdisjoint(options):
            return trainer
    raise UsageError(f"the options do not show whose they are: add --trainer {', '.join(SECTIONS_OF)}")


def doubt_about(options: Mapping[str, Any]) -> list[str]:
    """Return a line if options that were taken for those of GRPO may as well be RLOO's."""
    grpo, rloo = (trl_defaults()[f"{name}Config"].keys() for name in ("GRPO", "RLOO"))
    # What has no default is not among them.
    only_grpo = (grpo - rloo) | {
        "delta", "off_policy_mask_threshold", "use_adaptive_entropy", "vllm_importance_sampling_cap",
    }  # fmt: skip
    if trainer_of(options) != "grpo" or not only_grpo.isdisjoint(options):
        return []
    return ["--trainer: RLOO has all of these options as well, and GRPO was written: --trainer rloo is the other"]


def converted(options: Mapping[str, Any], trainer: str, devices: int) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration, and a line for each option that was not carried over.

    Args:
        options: options of TRL by their names.
        trainer: trainer of TRL, such as ``grpo``.
        devices: number of processes of the run of TRL, by which its batch counts.
    """
    return _Conversion(options, trainer, devices).result()


def _as_read(name: str, value: Any) -> Any:
    """Return a value as TRL reads it: mappings may be JSON, lists one value, and YAML's plain ``no`` is False."""
    if name.endswith(("_kwargs", "_config")) and isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise UsageError(f"{name} is not a mapping in JSON: {error}") from error
    if value is None:
        return _NULLS.get(name)
    if name.endswith("_strategy") and value is False:
        return "no"
    return [value] if name in _LISTS and value and not isinstance(value, list) else value


class _Conversion:
    """The conversion of one file.

    Reading an option by ``_carry`` marks it as carried over, with the value of TRL's default if the file does not set
    it; every other option of the file is listed, and so is what ``leave`` names, whoever reads it. So an option must be
    read wherever, and only where, its value counts.
    """

    def __init__(self, options: Mapping[str, Any], trainer: str, devices: int) -> None:
        read = {str(name): _as_read(str(name), value) for name, value in options.items()}
        given = {name: value for name, value in read.items() if value not in (None, "", [], {})}
        self._options = GivenOptions(given, defaults_of(trainer))
        self._nulls = {name for name, value in options.items() if value is None}
        self._carry = self._options.carry
        self._trainer, self._devices = trainer, devices
        self._is_online = trainer in ("grpo", "rloo")

    def result(self) -> tuple[dict[str, Any], list[str]]:
        module, data = _MODULES[self._trainer]
        loss: dict[str, Any] = {}
        if self._trainer == "grpo":
            module, loss = grpo_loss(self._options)
        elif self._trainer in LOSSES:
            loss = LOSSES[self._trainer](self._options)
        config: dict[str, Any] = {
            "seed_everything": int(self._carry("seed")),
            "model": {"class_path": f"lightning_rlhf.{module}", "init_args": self._model_section() | loss},
            "data": {"class_path": f"lightning_rlhf.{data}", "init_args": self._data_section()},
            "trainer": self._trainer_section(),
        }
        self._list_contradictions()
        known = {name for section in SECTIONS_OF[self._trainer] for name in table("trl").get(section, {})}
        return config, self._options.left(partial(counterpart, self._trainer), "TRL 1.16", known)

    def _list_contradictions(self) -> None:
        """List options of another trainer, another number of processes, and two sizes that TRL would not take."""
        given = self._options.given
        own = _MARKS.get(self._trainer, set()) | _SHARED.get(self._trainer, set())
        for trainer, marks in _MARKS.items():
            for name in (marks & given.keys()) - own:
                other = f"an option of TRL's {trainer} trainer, and this is {self._trainer}: --trainer sets another"
                self._options.leave(name, other)
        if self._carry("num_processes", self._devices) != self._devices:
            self._options.leave("num_processes")
        size, steps = given.get("generation_batch_size"), given.get("steps_per_generation")
        if self._is_online and size and steps:
            texts = self._texts_of_batches(steps)
            if int(size) != texts:
                other = f"steps_per_generation {steps} is {texts} texts with --devices {self._devices}"
                self._options.note(f"generation_batch_size: {size}: {other}, and TRL takes only one of the two options")

    def _model_section(self) -> dict[str, Any]:
        role = "reward_model" if self._trainer == "reward" else "actor"
        options: dict[str, Any] = {role: model_source(self._options, self._is_online)}
        options |= {"optimizer": optimizer(self._options), **schedule(self._options)}
        self._options.settle("packing", "padding_free")  # packing is the default here
        if self._trainer == "sft" and self._options.is_set("packing"):
            self._options.note("packing: TRL's batch sizes count packed texts of max_length tokens, batch_size rows")
        options["max_grad_norm"] = float(self._carry("max_grad_norm")) or None  # 0 does not clip in TRL
        if self._is_online:
            options |= self._online_model()
        return options

    def _online_model(self) -> dict[str, Any]:
        """Return the options of the module that only training on responses has."""
        options: dict[str, Any] = {"update_epochs": int(self._carry("num_iterations"))}
        step, update = self._texts_of_step(), self._texts_of_update()
        if step != update:
            options["minibatch_size"] = update
        if step % update:
            self._options.note(f"minibatch_size {update} does not divide {step} responses")
        if path := self._carry("reward_model_name_or_path"):
            options["reward_model"] = path
        return options

    def _steps(self, updates: int) -> int:
        """Return the steps with a number of updates: a step here has all updates of its responses."""
        if not self._is_online:
            return updates
        texts = self._texts_of_step() * int(self._carry("num_iterations"))
        return math.ceil(updates * self._texts_of_update() / texts)

    # TRL generates the texts of steps_per_generation batches at once, and an update has gradient_accumulation_steps of
    # them. A step here is what is generated at once, with all of its updates.

    def _texts_of_update(self) -> int:
        """Return the texts of an update, over all devices."""
        return self._texts_of_batches(self._carry("gradient_accumulation_steps"))

    def _texts_of_batches(self, batches: Any) -> int:
        """Return the texts of a number of batches, over all devices."""
        return int(self._carry("per_device_train_batch_size")) * int(batches) * self._devices

    def _texts_of_step(self) -> int:
        """Return the texts of a step: the responses that are generated at once, or the texts of an update."""
        if not self._is_online:
            return self._texts_of_update()
        size, steps = self._carry("generation_batch_size"), self._carry("steps_per_generation")
        if size:
            return int(size)
        return self._texts_of_batches(steps) if steps else self._texts_of_update()

    def _data_section(self) -> dict[str, Any]:
        tokenizer = self._carry("tokenizer_name_or_path") or self._carry("model_name_or_path", NO_MODEL)
        train, val = self._rows_of_training(), self._rows_of_validation()
        data: dict[str, Any] = {"tokenizer": tokenizer, "train": train}
        group = int(self._carry("num_generations")) if self._is_online else 1
        if val is not None:
            data["val"] = val
            if self._options.is_set("per_device_eval_batch_size"):
                texts = int(self._carry("per_device_eval_batch_size")) * self._devices
                data["val_batch_size"] = max(1, texts // int(self._carry("num_generations_eval", group)))
        texts = self._texts_of_step()
        data["batch_size"] = max(1, texts // group)
        if texts % group:
            self._options.note(f"per_device_train_batch_size: {texts} responses of a step are no multiple of {group}")
        data |= self._lengths()
        columns = {"prompt": self._carry("dataset_prompt_column")}
        if self._trainer == "sft":
            columns["text"] = self._carry("dataset_text_field")
        if renamed := {field: column for field, column in columns.items() if column != field}:
            data["columns"] = renamed
        if not self._shuffles():
            data["shuffle"] = False
        if kwargs := self._carry("chat_template_kwargs"):
            data["chat_template_kwargs"] = kwargs
        return data

    def _rows_of_training(self) -> Any:
        mixture = [rows for entry in self._carry("datasets", []) for rows in self._rows_of_entry(entry)]
        if mixture:
            return mixture if len(mixture) > 1 else mixture[0]
        rows = self._rows_of_split("train")
        if rows is None:
            self._options.note("dataset_name: the file names no data; write your rows to run.yaml, under train")
        return rows or "set the rows of training"

    def _rows_of_validation(self) -> Any:
        """Return the rows of validation; None if TRL does not validate, or the file names none."""
        if self._eval_strategy() == "no":
            for unread in ("eval_steps", "dataset_test_split", "per_device_eval_batch_size"):
                self._options.leave(unread, "eval_strategy is no: nothing is validated, as in TRL")
            return None
        rows = None if self._carry("datasets") else self._rows_of_split("test")
        if rows is None:
            self._options.note("eval_strategy: the file names no rows of validation: write them to run.yaml, under val")
        return rows

    def _rows_of_split(self, split: str) -> Any:
        """Return the rows of a split of the file's one data set, ``train`` or ``test``; None if it names none."""
        name, config, files = map(self._carry, ("dataset_name", "dataset_config", "data_files"))
        theirs = self._carry(f"dataset_{split}_split")
        return self._source_of_rows(name or "json", theirs, config, files) if name or files else None

    def _rows_of_entry(self, entry: Any) -> list[Any]:
        """Return the sources of an entry of a mixture of data sets."""
        if not isinstance(entry, dict) or not entry.get("path"):
            raise UsageError(f"datasets: each entry needs its path, got {entry!r:.80}")
        further = {name: value for name, value in entry.items() if name not in ("path", "split", "name", "data_files")}
        if further:
            self._options.note(f"datasets: {further!r:.80} of {entry['path']} (a part has all of its rows and columns)")
        split = entry.get("split") or "train"
        rows = self._source_of_rows(entry["path"], split, entry.get("name"), entry.get("data_files"))
        if rows is None:
            raise UsageError(f"datasets: data_files of {entry['path']} has no files for its split {split!r}")
        return rows if isinstance(rows, list) else [rows]

    def _source_of_rows(self, path: str, split: str, config: str | None, files: Any) -> Any:
        if files and "[" in split:
            self._options.note(f"{split}: a split of files has all of their rows")
        return rows_of(path, split, config, files)

    def _shuffles(self) -> bool:
        """Return whether rows are shuffled, which ``shuffle_dataset`` decides where TRL does not sample at random."""
        if self._is_online:
            return bool(self._carry("shuffle_dataset"))
        sampling = self._carry("train_sampling_strategy")
        if sampling == "sequential":  # in the order of the set, which TRL may have shuffled
            return bool(self._carry("shuffle_dataset"))
        if sampling == "group_by_length":
            self._options.leave("train_sampling_strategy")
        self._options.settle("shuffle_dataset")
        return True

    def _lengths(self) -> dict[str, Any]:
        """Return the options of the data for texts that are too long."""
        if self._is_online:
            if not self._options.is_set("max_prompt_length"):
                self._options.note("max_tokens of the data is 512: TRL has no limit, a longer prompt is a bad row")
            return {"max_tokens": int(self._carry("max_prompt_length", 512))}
        if "max_length" in self._nulls:
            self._options.note(f"max_length: null: a text beyond {_ANY_LENGTH} tokens, max_tokens here, is a bad row")
            return {"max_tokens": _ANY_LENGTH, "too_long": "bad_row"}
        length = self._carry("max_length")
        if "max_length" not in self._options.given and self._trainer == "sft":  # the name of earlier releases
            length = self._carry("max_seq_length", length)
        cut = "cut_start" if self._carry("truncation_mode") == "keep_end" else "cut_end"
        return {"max_tokens": int(length), "too_long": cut}

    def _trainer_section(self) -> dict[str, Any]:
        run: dict[str, Any] = {**self._duration(), **self._strategy()}
        if self._carry("bf16"):
            run["precision"] = "bf16-mixed"
        directory = self._carry("output_dir", f"runs/{self._trainer}")
        run |= {**self._loggers(directory), **self._interval()}
        callbacks: dict[str, Any] = {}
        if self._is_online:
            callbacks["RolloutLoop"] = rollout(self._options, "max_completion_length" in self._nulls)
        callbacks["RunCheckpoint"] = self._every("save")
        if keep := self._carry("save_total_limit"):
            callbacks["RunCheckpoint"]["keep_last"] = int(keep)
        if lines := self._every("logging"):
            callbacks["Console"] = lines
        run["callbacks"] = [
            {"class_path": f"lightning_rlhf.callbacks.{name}", "init_args": options}
            for name, options in callbacks.items()
        ]
        return {**run, "default_root_dir": directory}

    def _duration(self) -> dict[str, Any]:
        if (steps := int(self._carry("max_steps"))) > 0:
            self._options.settle("num_train_epochs")
            return {"max_steps": self._steps(steps)}
        epochs = float(self._carry("num_train_epochs"))
        whole = max(1, round(epochs))
        if not epochs.is_integer():
            self._options.leave("num_train_epochs", f"max_epochs is {whole}: set max_steps for a part")
        return {"max_epochs": whole}

    def _strategy(self) -> dict[str, Any]:
        name = "single"
        if self._devices > 1:
            name = "fsdp" if self._has_fsdp() else "ddp"
        strategy: Any = f"rlhf_{name}"
        if self._carry("gradient_checkpointing"):
            strategy = {"class_path": _STRATEGIES[name], "init_args": {"activation_checkpointing": True}}
        if self._devices > 1:
            return {"devices": self._devices, "strategy": strategy}
        return {"strategy": strategy} if isinstance(strategy, dict) else {}

    def _has_fsdp(self) -> bool:
        """Return whether the weights are sharded; the words of the option that are not here are listed."""
        words = self._carry("fsdp")
        listed = words.split() if isinstance(words, str) else words if isinstance(words, list) else []
        further = [word for word in listed if word not in ("full_shard", "auto_wrap")]
        if further:
            self._options.leave("fsdp", f"without {', '.join(further)}: see the options of RLHFFSDPStrategy")
        return bool(words)

    def _eval_strategy(self) -> str:
        """Return when TRL validates: ``no``, ``steps`` or ``epoch``."""
        today, earlier = self._carry("eval_strategy"), self._carry("evaluation_strategy")
        return str(earlier if today == "no" else today)

    def _interval(self) -> dict[str, Any]:
        """Return the steps between two validations; that of each epoch is the default."""
        strategy = self._eval_strategy()
        if strategy == "epoch":
            self._options.settle("eval_steps")
        elif strategy not in ("no", "steps"):
            name = "evaluation_strategy" if self._carry("eval_strategy") == "no" else "eval_strategy"
            self._options.leave(name, "no, steps and epoch are TRL's: each epoch is validated here")
        if strategy != "steps":
            return {}
        every = float(self._carry("eval_steps") or self._carry("logging_steps"))  # the latter is TRL's default
        if every >= 1:
            return {"val_check_interval": self._steps(int(every))}
        self._options.note(f"eval_steps: {every}: a fraction of the run in TRL, of an epoch here")
        return {"val_check_interval": every}

    def _every(self, what: str) -> dict[str, int]:
        """Return the steps between two saves, or two lines; empty, and listed, if TRL does not count steps."""
        if self._carry(f"{what}_strategy") != "steps":
            self._options.leave(f"{what}_strategy")
            self._options.settle(f"{what}_steps")  # TRL does not read it
            return {}
        every = float(self._carry(f"{what}_steps"))
        if every >= 1:
            return {"every_n_steps": self._steps(int(every))}
        self._options.leave(f"{what}_steps", "a fraction of the run: set every_n_steps")
        return {}

    def _loggers(self, directory: str) -> dict[str, Any]:
        """Return the loggers; TensorBoard is named only beside others, because each run has it by default."""
        known, names = trl_loggers(), self._carry("report_to")
        if unknown := [str(name) for name in names if name not in (*known, "none")]:
            self._options.leave("report_to", f"without {', '.join(unknown)}: set logger to one of Lightning's")
        loggers = []
        for name in filter(known.__contains__, names):
            arguments = {"save_dir": directory} if name == "tensorboard" else {}
            arguments |= known[name].get("init_args", {})
            for option, ours in known[name].get("options", {}).items():
                if self._options.is_set(option):
                    arguments[ours] = self._carry(option)
            loggers.append({"class_path": known[name]["class_path"], "init_args": arguments})
        if not loggers or names == ["tensorboard"]:
            return {}
        return {"logger": loggers if len(loggers) > 1 else loggers[0]}
