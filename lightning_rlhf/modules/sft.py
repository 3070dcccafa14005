"""Supervised fine-tuning: predict the marked tokens of given texts."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.role_module import RoleModule
from lightning_rlhf.modules.texts import text_scores
from lightning_rlhf.types import SequenceBatch


class SFTModule(RoleModule):
    """Supervised fine-tuning: trains a model to predict the marked tokens of your texts.

    The loss is the mean cross-entropy of these tokens, exact over the whole batch and all ranks.

    Args:
        actor: model to train: directory, hub id or ``FromConfig``.
        optimizer: factory that makes the optimizer from the model's parameters.
        lr_scheduler: factory of its scheduler, stepped once per batch. None keeps the rate constant.
        loss: ``cross_entropy``, or ``dft``, the cross-entropy of each token times its probability as a constant. With
            ``dft``, tokens that are unlikely under the model change it less. See "On the Generalization of SFT: A
            Reinforcement Learning Perspective with Reward Rectification", Wu et al. 2025, equation 9.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.role_module.RoleModule`.
    """

    trained_roles = ("actor",)
    reads = SequenceBatch
    allows_dropout = True

    def __init__(
        self,
        actor: str | ModelSource,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        loss: Literal["cross_entropy", "dft"] = "cross_entropy",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if loss not in ("cross_entropy", "dft"):
            raise UsageError(f"loss of SFTModule must be cross_entropy or dft, got {loss!r}")
        self.set_sources(actor=actor)
        self.loss = loss
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        """Update the role on one batch."""
        tokens = self.data_ranks.sum(batch.loss_mask.sum()).clamp(min=1)
        result = self.update("actor", batch, self.token_loss, tokens)
        metrics = {**result.means.means(self.data_ranks), "grad_norm/actor": float(result.grad_norm)}
        self.finish_step(metrics, bar=("train/loss",))

    def validation_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        """Log the loss of held-out texts, the mean over tokens."""
        means = self.micro_batches.measure(batch, partial(self.token_loss, prefix="val"))
        self.log_validation(means, batch.loss_mask.sum(), bar="val/loss")

    def token_loss(self, rows: SequenceBatch, means: MeanAccumulator, prefix: str = "train") -> Tensor:
        """Compute the loss, summed over the marked tokens of some rows; the metric is the negative log-likelihood."""
        (logprobs, entropy, *_), mask = text_scores(self, "actor", rows)
        means.add(f"{prefix}/loss", -logprobs, mask)
        means.add(f"{prefix}/entropy", entropy, mask)
        if self.loss == "dft":
            return -(logprobs.detach().exp() * logprobs).sum()
        return -logprobs.sum()

    def build_role(self, name: str) -> nn.Module:
        """Build a language model."""
        return self.sources[name].causal()

    def optimizer_of(self, name: str) -> tuple[Any, Any]:
        """Return the optimizer and scheduler factories."""
        return self.optimizer, self.lr_scheduler
