"""Train with lightning-rlhf: ``python -m benchmarks.compare.ours TASK DIRECTORY RESULT STEPS``.

TASK is grpo, grpo-groups (the responses to a prompt stay in one
mini-batch), grpo-ahead (they are generated while the module learns), grpo-ahead-groups, grpo-4x and grpo-16x (more
responses in steps and mini-batches), grpo-smollm2 (with a chat model), grpo-smollm2-padded (with padded rows), ppo,
sft, sft-4096 and others (with one long text in a step), sft-smollm2, qlora (the same with adapters over weights in 4
bits), dpo, distillation, images or images-sft; -threads, -bf16 and -mkl at the end are for runs with more threads, in
bfloat16, and without oneDNN's products.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rlhf import launch_environment

launch_environment.apply()  # as the command does before it imports anything else

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from benchmarks.compare import task, tools  # noqa: E402
from benchmarks.compare.meter import WARM, Meter  # noqa: E402
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
from lightning_rlhf.objectives.corrections import RolloutCorrection  # noqa: E402
from lightning_rlhf.objectives.kl_controllers import KLTerm  # noqa: E402
from lightning_rlhf.rewards.function import RewardFunction  # noqa: E402
from lightning_rlhf.tasks.drawings import Numbers, Readings, exact  # noqa: E402


class Metered(Callback):
    """Marks the steps of a run."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.trained_tokens = 0  # that the layers of the actor compute in the updates of a step
        self.passes = 0.0  # tokens through the layers of all roles; without gradients they count a third

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the tokens that go through the layers of each role."""
        of_actor = pl_module.actor.lm.get_input_embeddings() if hasattr(pl_module, "actor") else None

        def count(embedding: Any, inputs: Any, output: Any) -> None:
            is_trained = torch.is_grad_enabled()
            self.passes += inputs[0].numel() * (1 if is_trained else 1 / 3)
            self.trained_tokens += inputs[0].numel() if is_trained and embedding is of_actor else 0

        models = (module for module in pl_module.modules() if isinstance(module, PreTrainedModel))
        for embedding in {model.get_input_embeddings() for model in models}:
            if isinstance(embedding, torch.nn.Embedding):  # not the one of an image encoder
                embedding.register_forward_hook(count)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin the first step; each further one begins where the one before ended."""
        if self.meter.started is None:
            self.meter.mark()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step."""
        rollout = getattr(pl_module, "last_rollout", None)
        if rollout is None:
            self.meter.mark(tokens=int(batch.real_lengths.sum()), passes=self.passes)
        else:
            parts = {name: float(trainer.callback_metrics[f"time/{name}_s"]) for name in task.PARTS}
            self.meter.mark(
                tokens=int(rollout.total_lengths.sum()),
                response_tokens=int(rollout.response_lengths.sum()),
                trained_tokens=self.trained_tokens,
                passes=self.passes,
                update=parts["update"],
                parts=parts,
                reward=float(rollout.reward.mean()),
            )
            self.trained_tokens = 0
        self.passes = 0.0


def parts_of(name: str, directory: Path) -> tuple[Any, Any, list[Callback]]:
    """Return module, data and callbacks of a task."""
    sizes = task.sizes_of(name)
    long = task.tokens_of(name)
    directory = directory / (sizes.folder if long is None else "long")
    model, tokenizer = str(directory / "model"), str(directory / "tokenizer")
    optimizer = partial(torch.optim.AdamW, lr=sizes.learning_rate, weight_decay=0.0)
    if name == "tools":
        return tools.ours(directory / "tools", optimizer)
    if name.startswith("images"):
        return parts_with_images(name, Pretrained(model, train_vision=True), tokenizer, optimizer)
    if name.startswith("sft") or name in ("dpo", "qlora"):
        size = task.ROWS if name in ("sft", "dpo") else task.SAVED_ROWS if long is None else 1
        rows: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": size, "max_tokens": long or 128}
        if name != "dpo":
            rows |= {"train": str(directory / f"{long or 'problems'}.jsonl"), "columns": {"completion": "answer"}}
            source = Pretrained(model, lora=LoRA(**task.LORA), quantization="nf4") if name == "qlora" else model
            return SFTModule(source, optimizer=optimizer), ConversationDataModule(**rows), []
        rows |= {"train": str(directory / "pairs.jsonl")}
        return DPOModule(model, loss=DPOLoss(task.BETA), optimizer=optimizer), PreferenceDataModule(**rows), []
    module: Any
    times = int(name.removeprefix("grpo-").removesuffix("x")) if name.endswith("x") else 1
    if name.startswith("grpo"):
        group = sizes.group
        module = GRPOModule(
            model,
            kl_loss=KLTerm(0.0),
            aggregation=TokenMean(),
            optimizer=optimizer,
            minibatch_size=times * sizes.minibatch,
            keep_groups=name.endswith("groups"),
            packing=not name.endswith("padded"),
            correction=RolloutCorrection("token") if "ahead" in name else None,
        )
    elif name == "distillation":
        group = 1
        module = DistillationModule(model, teacher=model, optimizer=optimizer, minibatch_size=task.DISTILLED)
    else:
        group = 1
        module = PPOModule(
            model,
            critic=model,
            advantages=GAE(gamma=1.0, gae_lambda=1.0),
            kl_reward=KLTerm(0.05, "k1"),
            vf_coef=0.1,
            optimizer=optimizer,
            critic_optimizer=optimizer,
            minibatch_size=sizes.minibatch,
        )
    data = PromptDataModule(
        train=str(directory / "problems.jsonl"),
        tokenizer=tokenizer,
        batch_size=task.DISTILLED if name == "distillation" else times * sizes.responses // group,
        max_tokens=sizes.prompt_tokens,
    )
    loop = RolloutLoop(
        [RewardFunction(task.reward)],
        group_size=group,
        max_response_tokens=sizes.response_tokens,
        validate_at_ends=False,
        max_staleness=int("ahead" in name),
    )
    return module, data, [loop]


def parts_with_images(name: str, model: Pretrained, tokenizer: str, optimizer: Any) -> tuple[Any, Any, list[Callback]]:
    """Return module, data and callbacks of a task with pictures; the image encoder is trained too."""
    sizes = task.IMAGES
    rows: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": sizes.prompt_tokens}
    if name == "images-sft":
        data = ConversationDataModule(train=Readings(task.PICTURES), batch_size=task.ROWS, **rows)
        return SFTModule(model, optimizer=optimizer), data, []
    module = GRPOModule(
        model,
        kl_loss=KLTerm(0.0),
        aggregation=TokenMean(),
        optimizer=optimizer,
        minibatch_size=sizes.minibatch,
        correction=None,
    )
    loop = RolloutLoop(
        [RewardFunction(exact)],
        group_size=sizes.group,
        max_response_tokens=sizes.response_tokens,
        validate_at_ends=False,
    )
    return module, PromptDataModule(train=Numbers(task.PICTURES), batch_size=sizes.prompts, **rows), [loop]


def main(name: str, directory: str, result: str, steps: str) -> None:
    """Train for some warm steps and those that are counted."""
    L.seed_everything(1)
    torch.backends.mkldnn.enabled = not name.endswith("-mkl")
    name = name.removesuffix("-mkl")
    module, data, callbacks = parts_of(name, Path(directory))
    meter = Meter(Path(result))
    trainer = L.Trainer(
        max_steps=WARM + int(steps),
        callbacks=complete([*callbacks, Metered(meter)]),
        default_root_dir=Path(directory) / "ours",
        accelerator="cpu",
        precision="bf16-mixed" if name.endswith("bf16") else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=data)
    meter.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
