"""Train with lightning-rlhf: ``python -m benchmarks.learning.ours TASK VARIANT RATE SEED DIRECTORY RESULT``."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rlhf import launch_environment

launch_environment.apply()  # as the command does before it imports anything else

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from benchmarks.compare.meter import Meter  # noqa: E402
from benchmarks.learning import tasks  # noqa: E402
from lightning_rlhf import (  # noqa: E402
    ConversationDataModule,
    DistillationModule,
    DPOModule,
    GRPOModule,
    PPOModule,
    PreferenceDataModule,
    Pretrained,
    PromptDataModule,
    SFTModule,
)
from lightning_rlhf.callbacks import RolloutLoop, complete  # noqa: E402
from lightning_rlhf.extras.algorithms.preference_losses import DPOLoss  # noqa: E402
from lightning_rlhf.models.lora import LoRA  # noqa: E402
from lightning_rlhf.objectives.advantages import GAE  # noqa: E402
from lightning_rlhf.objectives.aggregation import TokenMean  # noqa: E402
from lightning_rlhf.objectives.kl_controllers import KLTerm  # noqa: E402
from lightning_rlhf.objectives.value_losses import ClippedValueLoss  # noqa: E402
from lightning_rlhf.rewards.function import RewardFunction  # noqa: E402


class Points(Callback):
    """Evaluates the actor every few steps."""

    def __init__(self, curve: tasks.Curve) -> None:
        self.curve = curve

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate before anything is generated, then let the time run."""
        self.curve.start()
        self.curve.point(0, pl_module.actor.lm)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Evaluate after a step."""
        rollout = getattr(pl_module, "last_rollout", None)
        reward = float("nan") if rollout is None else float(rollout.reward.mean())
        self.curve.point(
            batch_idx + 1 + trainer.current_epoch * trainer.num_training_batches, pl_module.actor.lm, reward
        )


def parts_of(task: tasks.Task, folder: Path, weights: str, rate: float) -> tuple[Any, Any, list[Callback]]:
    """Return module, data and callbacks."""
    model = str(folder / "model")
    optimizer = partial(torch.optim.AdamW, lr=rate, weight_decay=0.0)
    texts: dict[str, Any] = {"tokenizer": model, "batch_size": task.prompts}
    if task.algorithm == "sft":
        rows = {"train": str(folder / "train.jsonl"), "columns": {"completion": "answer"}}
        data = ConversationDataModule(**rows, **texts, max_tokens=task.prompt_tokens + task.response_tokens)
        return SFTModule(model, optimizer=optimizer), data, []
    if task.algorithm == "dpo":
        pairs = str(folder / "pairs.jsonl")
        preferences = PreferenceDataModule(train=pairs, **texts, max_tokens=task.prompt_tokens + task.response_tokens)
        return DPOModule(model, loss=DPOLoss(tasks.BETA), optimizer=optimizer), preferences, []
    module: Any
    if task.algorithm == "distillation":
        teacher = str(folder / "teacher")
        module = DistillationModule(model, teacher=teacher, optimizer=optimizer, minibatch_size=task.minibatch)
    elif task.algorithm == "ppo":
        module = PPOModule(
            model,
            critic=model,
            advantages=GAE(gamma=1.0, gae_lambda=1.0),
            kl_reward=KLTerm(tasks.KL, "k1"),
            vf_coef=tasks.VALUE,
            value_loss=ClippedValueLoss(tasks.VALUE_CLIP),
            optimizer=optimizer,
            critic_optimizer=optimizer,
            minibatch_size=task.minibatch,
        )
    else:
        lora = LoRA(rank=tasks.RANK, alpha=tasks.ALPHA) if weights == "lora" else None
        module = GRPOModule(
            Pretrained(model, lora=lora),
            kl_loss=KLTerm(0.0),
            aggregation=TokenMean(),
            optimizer=optimizer,
            minibatch_size=task.minibatch,
            keep_groups=True,
        )
    loop = RolloutLoop(
        [RewardFunction(tasks.REWARDS[task.rows])],
        group_size=task.group,
        max_response_tokens=task.response_tokens,
        validate_at_ends=False,
    )
    return module, PromptDataModule(train=str(folder / "train.jsonl"), **texts, max_tokens=task.prompt_tokens), [loop]


def main(name: str, variant: str, rate: str, seed: str, directory: str, result: str) -> None:
    """Train and write the curve."""
    task, (weights, dtype) = tasks.TASKS[name], variant.split("-")
    folder = Path(directory) / task.rows
    L.seed_everything(int(seed))
    module, data, callbacks = parts_of(task, folder, weights, float(rate))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    curve = tasks.Curve(tasks.Evaluation(name, Path(directory), tokenizer, dtype), Meter(Path(result)), task.every)
    trainer = L.Trainer(
        max_steps=task.steps,
        callbacks=complete([Points(curve), *callbacks]),
        default_root_dir=Path(result).with_suffix(""),
        precision="bf16-mixed" if dtype == "bfloat16" else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=data)
    Path(result).write_text(json.dumps(curve.points))


if __name__ == "__main__":
    main(*sys.argv[1:])
