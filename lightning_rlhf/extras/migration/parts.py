"""Tables of the options of other trainers, and what each is here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# What the first part of a target stands for: the class whose option it is, and words for it in a table.
PARTS = {
    "trainer": ("lightning.pytorch.trainer.trainer.Trainer", "`trainer`"),
    "model": ("lightning_rlhf.GRPOModule", "the module"),
    "data": ("lightning_rlhf.PromptDataModule", "the data module"),
    "rollout": ("lightning_rlhf.callbacks.RolloutLoop", "`RolloutLoop`"),
    "reward": ("lightning_rlhf.rewards.function.RewardFunction", "each entry of `rewards`"),
    "checkpoint": ("lightning_rlhf.callbacks.RunCheckpoint", "`RunCheckpoint`"),
    "console": ("lightning_rlhf.callbacks.Console", "`Console`"),
    "log": ("lightning_rlhf.callbacks.RolloutLog", "`RolloutLog`"),
    "following": ("lightning_rlhf.callbacks.FollowingReference", "`FollowingReference`"),
    "entropy": ("lightning_rlhf.callbacks.EntropyControl", "`EntropyControl`"),
    "environment": ("lightning_rlhf.environments.settings.EnvironmentSettings", "`environment` of `RolloutLoop`"),
    "optimizer": ("torch.optim.adamw.AdamW", "`optimizer` of the module"),
    "schedule": ("lightning_rlhf.modules.schedules.RunSchedule", "`lr_scheduler: RunSchedule` of the module"),
    "source": ("lightning_rlhf.Pretrained", "`Pretrained`"),
    "lora": ("lightning_rlhf.models.lora.LoRA", "`lora` of `Pretrained`"),
    "hub": ("lightning_rlhf.data.rows.HubDataset", "`train: HubDataset`"),
    "strategy": ("lightning_rlhf.strategies.single.RLHFSingleDeviceStrategy", "the strategy"),
    "fsdp": ("lightning_rlhf.strategies.fsdp.RLHFFSDPStrategy", "`RLHFFSDPStrategy`"),
    "engine": ("lightning_rlhf.rollout.vllm.engine.VLLMEngine", "`VLLMEngine`"),
    "kl_loss": ("lightning_rlhf.objectives.kl_controllers.KLTerm", "`kl_loss` of the module"),
    "kl_reward": ("lightning_rlhf.objectives.kl_controllers.KLTerm", "`kl_reward` of the module"),
    "clip": ("lightning_rlhf.objectives.policy_losses.ClippedPolicyLoss", "`policy_loss` of the module"),
    "sapo": ("lightning_rlhf.extras.algorithms.policy_losses.SAPOLoss", "`policy_loss` of `SAPOModule`"),
    "grpo": ("lightning_rlhf.objectives.group_advantages.GRPO", "`advantages` of `GRPOModule`"),
    "ppo": ("lightning_rlhf.PPOModule", "`PPOModule`"),
    "gae": ("lightning_rlhf.objectives.advantages.GAE", "`advantages` of `PPOModule`"),
    "correction": ("lightning_rlhf.objectives.corrections.RolloutCorrection", "`correction` of the module"),
    "shaping": ("lightning_rlhf.rewards.shaping.ScoreShaping", "`score_shaping` of the module"),
    "dpo": ("lightning_rlhf.extras.algorithms.preference_losses.DPOLoss", "`loss` of `DPOModule`"),
    "kto": ("lightning_rlhf.extras.algorithms.preference_losses.KTOLoss", "`loss` of `KTOModule`"),
    "pairs": ("lightning_rlhf.objectives.pairwise_loss.PairwiseLoss", "`loss` of `RewardModule`"),
}
_FORMATS = ("json", "csv", "parquet", "arrow", "text")  # of files, as datasets.load_dataset names them
SECTIONS = ("seed_everything", "ckpt_path")  # options of the command
# Options of a module or strategy that not every one has, with one that has it.
OWNERS = {
    "model.loss": "lightning_rlhf.DPOModule", "model.ref": "lightning_rlhf.DPOModule",
    "model.sft_coef": "lightning_rlhf.DPOModule", "strategy.class_path": "",
}  # fmt: skip


class Counterpart(NamedTuple):
    """What an option of another trainer is here.

    Args:
        part: first part of the option here, a key of :data:`PARTS`; empty if it has none.
        option: its option; empty without.
        words: what else there is to say.
        is_missing: whether the feature is not here; otherwise an option without a counterpart needs none.
    """

    part: str
    option: str
    words: str
    is_missing: bool

    def sentence(self) -> str:
        """Return what a table shows."""
        if self.is_missing:
            return f"not here: {self.words}"
        if not self.option:
            return f"no option: {self.words}"
        owner = PARTS[self.part][1] if self.part in PARTS else ""
        text = f"`{self.option}` of {owner}" if owner else f"`{self.option}`"
        return f"{text}: {self.words}" if self.words else text


@cache
def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of ``<name>.yaml``: the options, then further tables that the conversion needs."""
    return list(yaml.safe_load_all(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")))


def trl_defaults() -> dict[str, dict[str, Any]]:
    """Return TRL's defaults by the class of a trainer's options."""
    return documents("trl")[1]


def trl_optimizers() -> dict[str, dict[str, Any]]:
    """Return the optimizer for each value of ``optim``, with the arguments of AdamW that it does not take."""
    return documents("trl")[2]


def trl_loggers() -> dict[str, dict[str, Any]]:
    """Return the logger for each value of ``report_to``, with what its options are called here."""
    return documents("trl")[3]


@cache
def table(name: str) -> dict[str, dict[str, Counterpart]]:
    """Return the counterparts of a program's options by their section, such as ``GRPOConfig``.

    Args:
        name: program whose options ``<name>.yaml`` has.
    """
    return {
        section: {option: _counterpart(text) for option, text in options.items()}
        for section, options in documents(name)[0].items()
    }


def _counterpart(text: str) -> Counterpart:
    kind, _, words = text.partition(" ")
    if kind in ("-", "="):
        return Counterpart("", "", words, kind == "-")
    target, _, words = text.partition("; ")
    if target in SECTIONS:
        return Counterpart(target, target, words, False)
    part, _, option = target.partition(".")
    return Counterpart(part, option, words, False)


def vllm_engine(options: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of vLLM with its options; its GPUs are those of as many processes of the run."""
    engine = {"class_path": "lightning_rlhf.rollout.vllm.engine.VLLMEngine", "init_args": options}
    if (ranks := int(options.get("tensor_parallel_size", 1))) < 2:
        return engine
    shared = {"engine": engine, "ranks": ranks}
    return {"class_path": "lightning_rlhf.rollout.shared.SharedEngine", "init_args": shared}


def rows_of(path: str, split: str, name: str | None = None, files: Any = None) -> Any:
    """Return a source of rows: a data set of the hub, some of its files, or files of this machine; None without any.

    Args:
        path: id of a data set, or the format of files of this machine, such as ``json``.
        split: split of the data set.
        name: configuration of the data set.
        files: a file or several, which are those of training, or the files of each split.
    """
    if files:
        part = split.partition("[")[0]  # without a slice such as [:10%]
        names = (files if isinstance(files, Mapping) else {"train": files}).get(part)
        folder = "" if path in _FORMATS else f"hf://datasets/{path}/"
        return [folder + file for file in names] if isinstance(names, list) else folder + names if names else None
    if split == "train" and not name:
        return path
    options = {"path": path, "split": split, **({"name": name} if name else {})}
    return {"class_path": "lightning_rlhf.data.rows.HubDataset", "init_args": options}
