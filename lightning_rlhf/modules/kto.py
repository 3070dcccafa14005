"""KTO: learn from answers that people judged one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.batching.sequences import mismatched
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.dpo import DPOModule
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.objectives.preference_losses import KTOLoss
from lightning_rlhf.types import UnpairedBatch


class KTOModule(DPOModule):
    """Kahneman-Tversky optimization: a thumb up or down per answer is all it asks for.

    The KL that gains and losses are counted from is measured on prompts with the answer of the next text in the batch
    over all ranks, as the paper has it; nothing is learnt from those. It takes a second forward pass of both models.
    See "KTO: Model Alignment as Prospect Theoretic Optimization", Ethayarajh et al. 2024.

    Args:
        actor: the policy to train: directory, hub id or ``FromConfig``.
        loss: from the log-ratio of an answer to its loss.
        **kwargs: see :class:`~lightning_rlhf.modules.dpo.DPOModule`.
    """

    reads = UnpairedBatch
    kl: Tensor  # of the present batch, nats

    def __init__(self, actor: str | ModelSource, loss: KTOLoss = KTOLoss(), **kwargs: Any) -> None:
        super().__init__(actor, **kwargs)
        self.loss = loss

    def setup(self, stage: str) -> None:
        """Refuse batches of one text, whose KL would be measured on its own answer."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for name in ("batch_size", "val_batch_size"):
            if getattr(data, name, 2) < 2:
                raise ValueError(f"KTO measures its KL with the answers of other texts: {name} must be at least 2")
        super().setup(stage)

    def training_step(self, batch: UnpairedBatch, batch_idx: int) -> None:
        """One update on one batch."""
        self.kl = self.measured_kl(batch)
        metrics = self.learn(batch)
        metrics["train/score_margin"] = metrics["train/reward_chosen"] - metrics["train/reward_rejected"]
        self.finish_step(metrics, bar=("train/loss", "train/score_margin"))

    def on_validation_epoch_start(self) -> None:
        """Begin to sum up."""
        self._held_out = MeanAccumulator()

    def validation_step(self, batch: UnpairedBatch, batch_idx: int) -> None:
        """Loss and rewards of held-out answers, against the KL of their batch over all ranks."""
        self.kl = self.measured_kl(batch)
        self.losses(batch, self.map_micro_batches(self.row_scores, batch), self._held_out, "val")

    def on_validation_epoch_end(self) -> None:
        """Each mean over the answers that it is of, in all batches and ranks."""
        found = self._held_out.means(self.data_ranks)
        found["val/score_margin"] = found["val/reward_chosen"] - found["val/reward_rejected"]
        for name, value in found.items():
            self.log(name, value, prog_bar=name == "val/loss", batch_size=1)

    @torch.no_grad()
    def measured_kl(self, batch: UnpairedBatch) -> Tensor:
        """() the policy's KL to the reference, at least 0, by prompts with answers to others. All ranks.

        Args:
            batch: this rank's share.
        """
        texts = mismatched(batch, self.data_ranks.gather)
        log_ratios = self.map_micro_batches(self.answer_scores, texts)[0]
        means = MeanAccumulator()
        means.add("kl", log_ratios)
        return log_ratios.new_tensor(means.means(self.data_ranks)["kl"]).clamp(min=0)

    def row_scores(self, rows: UnpairedBatch) -> Sequence[Tensor]:
        """(B,) log-ratios of the answers, and the actor's log-probabilities of them."""
        return self.answer_scores(rows.texts)

    def losses(self, rows: UnpairedBatch, scores: Sequence[Tensor], means: MeanAccumulator, prefix: str) -> Tensor:
        """(B,) of each answer."""
        ratios, logprobs = scores
        losses: Tensor = self.loss(ratios, rows.desirable, self.kl)
        means.add(f"{prefix}/loss", losses)
        means.add(f"{prefix}/kl", self.kl.expand(len(rows)))
        for name, which in (("chosen", rows.desirable), ("rejected", ~rows.desirable)):
            means.add(f"{prefix}/reward_{name}", self.loss.beta * ratios, which)
            means.add(f"{prefix}/logprob_{name}", logprobs, which)
        return losses
