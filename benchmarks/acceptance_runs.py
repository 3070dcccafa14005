"""Small runs that several points of the acceptance share, and one that can be killed and resumed."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_rlhf import (
    ConversationDataModule,
    DAPOModule,
    DPOModule,
    GRPOModule,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    SFTModule,
)
from lightning_rlhf.callbacks import RolloutLoop, RunCheckpoint
from lightning_rlhf.callbacks.defaults import complete
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.doctor.trial import ARCHITECTURE, digest, share_of_a
from lightning_rlhf.models.loading import FromConfig
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.strategies.single import RLHFSingleDeviceStrategy
from tests.stand_ins import ScriptedEngine, quiet_trainer

LETTERS = CharacterTokenizer("abcdefg")
ADAM = partial(torch.optim.AdamW, lr=1e-3)
RUNS = ("ppo", "grpo", "dapo", "dpo", "sft", "reward")


def source(seed: int = 0, **changes: Any) -> FromConfig:
    """Return the small model."""
    return FromConfig({**ARCHITECTURE, **changes}, seed=seed)


def accelerator(device: str) -> str:
    """Return Lightning's name of a device."""
    return "gpu" if device == "cuda" else "cpu"


def trainer_on(device: str, folder: Path, **options: Any) -> Trainer:
    """Make a Trainer with one device that writes nothing but what its callbacks write."""
    ours = {"strategy": "rlhf_single", "devices": 1, "default_root_dir": folder, "accelerator": accelerator(device)}
    ours["use_distributed_sampler"] = False  # the data modules share rows among processes themselves
    return quiet_trainer(**(ours | options))


def module_of(name: str, **options: Any) -> Any:
    """Make the module of a run.

    Args:
        name: one of :data:`RUNS`.
        **options: further arguments of a module that learns from rollouts.
    """
    if name in ("dpo", "sft"):
        return {"dpo": DPOModule, "sft": SFTModule}[name](source(), optimizer=ADAM, micro_batch_tokens=64)
    if name == "reward":
        return RewardModule(source(), optimizer=ADAM, micro_batch_tokens=64)
    shared = {"optimizer": ADAM, "minibatch_size": 8, "micro_batch_tokens": 64} | options
    if name == "ppo":
        return PPOModule(source(), critic_optimizer=ADAM, **shared)
    return {"grpo": GRPOModule, "dapo": DAPOModule}[name](source(), **shared)


def data_of(name: str) -> Any:
    """Make the data of a run: eight rows for each of several steps."""
    if name == "sft":
        return ConversationDataModule(_rows(prompt="abc", completion="defg"), LETTERS, batch_size=8, max_tokens=16)
    if name in ("dpo", "reward"):
        rows = _rows(prompt="abc", chosen="de", rejected="fgab")
        return PreferenceDataModule(rows, LETTERS, batch_size=8, max_tokens=16)
    return PromptDataModule(_rows(prompt="abc"), LETTERS, batch_size=8, max_tokens=8)


def _rows(**row: str) -> InMemory:
    return InMemory([row] * 64)


def loop_of(name: str, scripted: bool) -> list[RolloutLoop]:
    """Make the RolloutLoop of a run that needs one.

    Args:
        name: one of :data:`RUNS`.
        scripted: whether responses are given texts, the same on every device, or sampled by transformers.
    """
    if name in ("dpo", "sft", "reward"):
        return []
    engine = ScriptedEngine(["abca", "defga", "bag"], LETTERS.load()) if scripted else TransformersEngine()
    options = {"group_size": 1 if name == "ppo" else 4, "max_response_tokens": 8, "validate_at_ends": False}
    return [RolloutLoop([RewardFunction(share_of_a)], engine, check_rows=0 if scripted else 4, **options)]


def one_step(name: str, device: str, folder: Path, precision: str, checkpointing: bool) -> tuple[Any, dict[str, float]]:
    """Fit a run for one step; return the module and its metrics."""
    module = module_of(name)
    trainer = trainer_on(
        device,
        folder,
        precision=precision,
        strategy=RLHFSingleDeviceStrategy(activation_checkpointing=checkpointing, accelerator=None),
        callbacks=loop_of(name, scripted=True),
        max_steps=1,
    )
    trainer.fit(module, datamodule=data_of(name))
    return module, {key: float(value) for key, value in trainer.callback_metrics.items()}


class KillAfter(Callback):
    """Kill this process when the step after a number of steps begins.

    Args:
        steps: steps to be done, at least 1.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Kill the process with SIGKILL."""
        if trainer.global_step == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def resumable(folder: Path, device: str, deterministic: bool, kill_after: int, resume: bool) -> str:
    """Run four steps of PPO with sampled responses; return the SHA-256 of the actor at the end.

    Args:
        folder: directory of the run.
        device: ``cuda`` or ``cpu``.
        deterministic: whether torch uses deterministic algorithms.
        kill_after: steps after which the process is killed; 0 never kills it.
        resume: whether to continue from the last checkpoint.
    """
    seed_everything(1, verbose=False)
    killing = [KillAfter(kill_after)] if kill_after else []
    callbacks = complete([*loop_of("ppo", scripted=False), RunCheckpoint(every_n_steps=1), *killing])
    trainer = trainer_on(
        device, folder, callbacks=callbacks, max_steps=4, deterministic=deterministic, enable_checkpointing=True
    )
    module = module_of("ppo")
    last = str(folder / "checkpoints" / "last.ckpt") if resume else None
    trainer.fit(module, datamodule=data_of("ppo"), ckpt_path=last)
    return digest(module.actor)


if __name__ == "__main__":
    path, where, exact, killed, resumed = sys.argv[1:]
    print("weights:", resumable(Path(path), where, exact == "exact", int(killed), resumed == "resume"))
