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
from lightning_rlhf import GRPOModule, Pretrained, PromptDataModule  # noqa: E402
from lightning_rlhf.callbacks import RolloutLoop, complete  # noqa: E402
from lightning_rlhf.models.lora import LoRA  # noqa: E402
from lightning_rlhf.objectives.aggregation import TokenMean  # noqa: E402
from lightning_rlhf.objectives.kl_controllers import KLTerm  # noqa: E402
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
        reward = float(pl_module.last_rollout.reward.mean())
        self.curve.point(
            batch_idx + 1 + trainer.current_epoch * trainer.num_training_batches, pl_module.actor.lm, reward
        )


def main(name: str, variant: str, rate: str, seed: str, directory: str, result: str) -> None:
    """Train and write the curve."""
    task, folder, (weights, dtype) = tasks.TASKS[name], Path(directory) / name, variant.split("-")
    L.seed_everything(int(seed))
    model = str(folder / "model")
    lora = LoRA(rank=tasks.RANK, alpha=tasks.ALPHA) if weights == "lora" else None
    module = GRPOModule(
        Pretrained(model, lora=lora),
        kl_loss=KLTerm(0.0),
        aggregation=TokenMean(),
        optimizer=partial(torch.optim.AdamW, lr=float(rate), weight_decay=0.0),
        minibatch_size=task.minibatch,
        keep_groups=True,
    )
    data = PromptDataModule(
        train=str(folder / "train.jsonl"), tokenizer=model, batch_size=task.prompts, max_tokens=task.prompt_tokens
    )
    loop = RolloutLoop(
        [RewardFunction(tasks.REWARDS[name])],
        group_size=task.group,
        max_response_tokens=task.response_tokens,
        validate_at_ends=False,
    )
    curve = tasks.Curve(
        tasks.Evaluation(name, Path(directory), AutoTokenizer.from_pretrained(model)), Meter(Path(result)), task.every
    )
    trainer = L.Trainer(
        max_steps=task.steps,
        callbacks=complete([Points(curve), loop]),
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
