"""A configuration from the options of a trainer of TRL, and the options that could not be carried over."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.migration.parts import Counterpart, table, trl_defaults
from lightning_rlhf.extras.migration.trl_data import data_section
from lightning_rlhf.extras.migration.trl_losses import LOSSES, grpo_loss, optimizer, schedule
from lightning_rlhf.extras.migration.trl_model import model_source
from lightning_rlhf.extras.migration.trl_options import TRLOptions
from lightning_rlhf.extras.migration.trl_trainer import trainer_section

# Sections of the table in which the options of a trainer are looked up, its own first. The table lists an option once,
# in the first of these classes that has it: beta of the GRPO trainer is in GRPOConfig, its learning_rate further on.
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
# Options by which a file without the name of its trainer is recognised. The first match decides, so KTO, CPO and RLOO
# stand before the trainers whose options they have as well. ORPO has none of its own.
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
# Options that GRPO has, RLOO has not, and that have no default, so that the table of defaults does not show them.
_GRPO_WITHOUT_DEFAULT = {
    "delta", "off_policy_mask_threshold", "use_adaptive_entropy", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_min", "max_tool_calling_iterations", "cast_lm_head_to_fp32",
}  # fmt: skip
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


def counterpart(trainer: str, option: str) -> Counterpart | None:
    """Return what an option of a trainer of TRL is here; None for an unknown option."""
    sections = (table("trl").get(section, {}) for section in SECTIONS_OF[trainer])
    return next((options[option] for options in sections if option in options), None)


def defaults_of(trainer: str) -> dict[str, Any]:
    """Return TRL's defaults of the options of a trainer; those of its own class win."""
    sections = (trl_defaults().get(section, {}) for section in reversed(SECTIONS_OF[trainer]))
    return {name: value for options in sections for name, value in options.items()}


def read_options(file: Path) -> dict[str, Any]:
    """Return the options of a JSON or YAML file: ``trainer_config.json``, or the file of ``trl grpo --config``.

    Raises:
        UsageError: the file cannot be read, is a program, or is not a mapping.
    """
    is_program = file.suffix in (".py", ".sh")
    try:
        text = file.read_text(encoding="utf-8")
        options = text if is_program else json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if is_program:
        raise UsageError(_advice_for_program(file, text))
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
    raise UsageError(f"the options do not show which trainer they are for: add --trainer {', '.join(SECTIONS_OF)}")


def doubt_about(options: Mapping[str, Any]) -> list[str]:
    """Return a line if options that were taken for those of GRPO may as well be RLOO's."""
    grpo, rloo = (trl_defaults()[f"{name}Config"].keys() for name in ("GRPO", "RLOO"))
    only_grpo = (grpo - rloo) | _GRPO_WITHOUT_DEFAULT
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
    read = TRLOptions(options, defaults_of(trainer), trainer, devices)
    config = _configuration(read)
    _list_contradictions(read)  # last, because reading an option counts as carrying it over
    known = {name for section in SECTIONS_OF[trainer] for name in table("trl").get(section, {})}
    return config, read.left(partial(counterpart, trainer), "TRL 1.16", known)


def _configuration(options: TRLOptions) -> dict[str, Any]:
    module, data = _MODULES[options.trainer]
    loss: dict[str, Any] = {}
    if options.trainer == "grpo":
        module, loss = grpo_loss(options)
    elif options.trainer in LOSSES:
        loss = LOSSES[options.trainer](options)
    return {
        "seed_everything": int(options.carry("seed")),
        "model": {"class_path": f"lightning_rlhf.{module}", "init_args": _model_section(options) | loss},
        "data": {"class_path": f"lightning_rlhf.{data}", "init_args": data_section(options)},
        "trainer": trainer_section(options),
    }


def _model_section(options: TRLOptions) -> dict[str, Any]:
    role = "reward_model" if options.trainer == "reward" else "actor"
    model: dict[str, Any] = {role: model_source(options), "optimizer": optimizer(options), **schedule(options)}
    options.settle("packing", "padding_free")  # packing is the default here
    for name in ("completion_only_loss", "assistant_only_loss"):
        if options.given.get(name) is False:
            options.note(f"{name}: False (the loss is over the completion, or the messages of the assistant)")
    if options.trainer == "sft" and options.is_set("packing"):
        options.note("packing: TRL's batch sizes count packed texts of max_length tokens, batch_size rows")
    model["max_grad_norm"] = float(options.carry("max_grad_norm")) or None  # 0 does not clip in TRL
    if options.is_online:
        model |= _online_model(options)
    return model


def _online_model(options: TRLOptions) -> dict[str, Any]:
    """Return the options of the module that only training on responses has."""
    model: dict[str, Any] = {"update_epochs": int(options.carry("num_iterations"))}
    step, update = options.texts_of_step(), options.texts_of_update()
    if step != update:
        model["minibatch_size"] = update
    if step % update:
        options.note(f"minibatch_size {update} does not divide {step} responses")
    if path := options.carry("reward_model_name_or_path"):
        model["reward_model"] = path
    return model


def _list_contradictions(options: TRLOptions) -> None:
    """List options of another trainer, another number of processes, and two sizes that TRL would not take."""
    given = options.given
    own = _MARKS.get(options.trainer, set()) | _SHARED.get(options.trainer, set())
    for trainer, marks in _MARKS.items():
        for name in (marks & given.keys()) - own:
            other = f"an option of TRL's {trainer} trainer, and this is {options.trainer}: --trainer sets another"
            options.leave(name, other)
    if options.carry("num_processes", options.devices) != options.devices:
        options.leave("num_processes")
    size, steps = given.get("generation_batch_size"), given.get("steps_per_generation")
    if options.is_online and size and steps:
        texts = options.texts_of_batches(steps)
        if int(size) != texts:
            other = f"steps_per_generation {steps} is {texts} texts with --devices {options.devices}"
            options.note(f"generation_batch_size: {size}: {other}, and TRL takes only one of the two options")
