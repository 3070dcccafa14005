"""KTO: training on single responses that are labelled desirable or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.dpo import DPOModule
from lightning_rlhf.extras.algorithms.preference_losses import KTOLoss
from lightning_rlhf.extras.algorithms.unpaired_rows import UnpairedBatch
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.types import SequenceBatch


class KTOModule(DPOModule):
    """Kahneman-Tversky optimization: trains on responses that are each labelled good or bad, without pairs.

    Gains and losses are measured from a reference point, a KL. It is estimated as in the paper, on prompts with the
    response of the next text in the batch over all ranks, without gradient. You pay for it with a second forward pass
    of both models.
    See "KTO: Model Alignment as Prospect Theoretic Optimization", Ethayarajh et al. 2024.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        loss: loss of a response from its log-ratio.
        **kwargs: arguments of :class:`~lightning_rlhf.extras.algorithms.dpo.DPOModule`.
    """

    reads = UnpairedBatch
    kl: Tensor  # of the present batch, nats

    def __init__(self, actor: str | ModelSource, loss: KTOLoss = KTOLoss(), **kwargs: Any) -> None:
        super().__init__(actor, **kwargs)
        if not self.has_reference or self.sft_coef:
            raise UsageError("KTO needs a reference and has no supervised term: remove ref: none and sft_coef")
        if self.start_logprobs is not None:
            raise UsageError("KTO also evaluates prompts with responses to others, but ref: start does not: remove it")
        self.loss = loss

    def setup(self, stage: str) -> None:
        """Raise for batches of one text, whose KL would be estimated on its own response."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for name in ("batch_size", "val_batch_size"):
            if getattr(data, name, 2) < 2:
                raise UsageError(f"KTO estimates its KL with the responses of other texts: {name} must be at least 2")
        if len(getattr(data, "examples", {}).get("val", ())) == 1:
            raise UsageError("KTO estimates its KL with the responses of other texts: val has one row, use at least 2")
        super().setup(stage)

    def training_step(self, batch: UnpairedBatch, batch_idx: int) -> None:
        """Update the role on one batch."""
        self.kl = self.measured_kl(batch)
        metrics = self.learn(batch)
        metrics["train/score_margin"] = metrics["train/reward_chosen"] - metrics["train/reward_rejected"]
        self.finish_step(metrics, bar=("train/loss", "train/score_margin"))

    def on_validation_epoch_start(self) -> None:
        """Reset the metrics."""
        self._held_out = MeanAccumulator()

    def validation_step(self, batch: UnpairedBatch, batch_idx: int) -> None:
        """Accumulate loss and rewards of held-out responses."""
        self.kl = self.measured_kl(batch)
        self.losses(batch, self.micro_batches.map(self.row_scores, batch), self._held_out, "val")

    def on_validation_epoch_end(self) -> None:
        """Log the means over all held-out responses of all ranks."""
        metrics = self._held_out.means(self.data_ranks)
        metrics["val/score_margin"] = metrics["val/reward_chosen"] - metrics["val/reward_rejected"]
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name == "val/loss", batch_size=1)

    @torch.no_grad()
    def measured_kl(self, batch: UnpairedBatch) -> Tensor:
        """Return () the policy's KL to the reference, at least 0, on prompts with responses to others. All ranks.

        Args:
            batch: rows of this rank.
        """
        texts = with_next_rows_response(batch, self.data_ranks)
        log_ratios = self.micro_batches.map(self.answer_scores, texts)[0]
        means = MeanAccumulator()
        means.add("kl", log_ratios)
        return log_ratios.new_tensor(means.means(self.data_ranks)["kl"]).clamp(min=0)

    def row_scores(self, rows: UnpairedBatch) -> Sequence[Tensor]:
        """Return (B,) log-ratios of the responses, and the actor's log-probs of them."""
        return self.answer_scores(rows.texts)

    def losses(self, rows: UnpairedBatch, scores: Sequence[Tensor], means: MeanAccumulator, prefix: str) -> Tensor:
        """Return (B,) the loss of each response."""
        ratios, logprobs = scores
        losses: Tensor = self.loss(ratios, rows.desirable, self.kl)
        means.add(f"{prefix}/loss", losses)
        means.add(f"{prefix}/kl", self.kl.expand(len(rows)))
        for name, which in (("chosen", rows.desirable), ("rejected", ~rows.desirable)):
            means.add(f"{prefix}/reward_{name}", self.loss.beta * ratios, which)
            means.add(f"{prefix}/logprob_{name}", logprobs, which)
        return losses


def with_next_rows_response(batch: UnpairedBatch, ranks: DataRanks) -> SequenceBatch:
    """Combine each prompt of this rank with the response of the next text in the whole batch, cyclically. All ranks.

    A response is cut where a text would be longer than the longest of the batch, so that it fits wherever they fit.

    Args:
        batch: rows of this rank.
        ranks: ranks that hold the other rows.
    """
    texts = batch.texts.map(ranks.gather).to("cpu")  # rows are cut one by one
    positions = ranks.gather(batch.position).cpu()
    order = positions.argsort()
    next_row = torch.empty_like(order)
    next_row[order] = order.roll(-1)
    starts = torch.where(texts.loss_mask.any(dim=1), texts.loss_mask.long().argmax(dim=1), texts.lengths)
    ends = _first_texts(texts)
    longest = int(ends.max())
    rows, masks = [], []
    for position in batch.position.tolist():
        index = int((positions == position).nonzero())
        other = int(next_row[index])
        prompt_tokens, other_start = int(starts[index]), int(starts[other])
        response = slice(other_start, min(int(ends[other]), other_start + longest - prompt_tokens))
        rows.append([*texts.input_ids[index, :prompt_tokens].tolist(), *texts.input_ids[other, response].tolist()])
        masks.append([*([False] * prompt_tokens), *texts.loss_mask[other, response].tolist()])
    ids, lengths = pad_right(rows)
    mask, _ = pad_right(masks)
    return SequenceBatch(ids, lengths, mask.bool(), batch.texts.images).to(batch.position.device)


def _first_texts(texts: SequenceBatch) -> Tensor:
    """Return (B,) the number of tokens of the first text of each row."""
    if texts.text_starts is None:
        return texts.lengths
    return torch.where(texts.text_starts.any(dim=1), texts.text_starts.long().argmax(dim=1), texts.lengths)
