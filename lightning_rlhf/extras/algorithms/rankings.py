"""Reward modelling from rankings: a scalar model is trained on several ranked answers to each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_rlhf.batching.sequences import concat_texts
from lightning_rlhf.extras.algorithms.ranking_losses import AllPairsLoss, RankingLoss, is_above
from lightning_rlhf.functional.samples import wilson_interval
from lightning_rlhf.metrics import PairCalibrationError, over
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.reward import RewardModule
from lightning_rlhf.types import SequenceBatch, TensorBatch, expect_shape


@dataclass(frozen=True)
class RankingBatch(TensorBatch):
    """Ranked answers to prompts, at most K to each; a row can have fewer.

    Args:
        input_ids: (B, K, L) int64 prompt with answer, right-padded.
        lengths: (B, K) int64, 0 without an answer.
        loss_mask: (B, K, L) bool, True on tokens of the answer.
        ranks: (B, K) int64, 1 for the best answer. Equal ranks are a tie, 0 is no answer.
        images: (B, K, I) int64, numbers of each text's images, padded by -1; None without images.
        text_starts: (B, K, L) bool, as of :class:`~lightning_rlhf.types.SequenceBatch`.
        shared: (B, K) int64, as of :class:`~lightning_rlhf.types.SequenceBatch`.
    """

    input_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    ranks: Tensor
    images: Tensor | None = None
    text_starts: Tensor | None = None
    shared: Tensor | None = None

    def __post_init__(self) -> None:
        expect_shape("RankingBatch.ranks", self.ranks, self.input_ids.shape[:2])
        expect_shape("RankingBatch.lengths", self.lengths, self.input_ids.shape[:2])
        expect_shape("RankingBatch.loss_mask", self.loss_mask, self.input_ids.shape)

    @classmethod
    def of(cls, texts: SequenceBatch, ranks: Tensor) -> RankingBatch:
        """Return a batch from its texts, row by row.

        Args:
            texts: as many texts as there are ranks above 0.
            ranks: (B, K) rank of each text, 0 at the end of rows with fewer.
        """

        def by_row(values: Tensor | None, fill: int = 0) -> Any:
            if values is None:
                return None
            table = values.new_full((*ranks.shape, *values.shape[1:]), fill)
            table[ranks > 0] = values
            return table

        first = (by_row(texts.input_ids), by_row(texts.lengths), by_row(texts.loss_mask), ranks)
        return cls(*first, by_row(texts.images, fill=-1), by_row(texts.text_starts), by_row(texts.shared))

    @property
    def texts(self) -> SequenceBatch:
        """The texts of all rows, row by row."""
        parts = (self.input_ids, self.lengths, self.loss_mask, self.images, self.text_starts, self.shared)
        return SequenceBatch(*(None if part is None else part[self.ranks > 0] for part in parts))  # type: ignore[arg-type]

    @property
    def total_lengths(self) -> Tensor:
        """(B,) most tokens of a row if its texts are padded to its longest one, and it has as many as any other."""
        return self.ranks.shape[1] * self.lengths.amax(dim=1)

    @property
    def real_lengths(self) -> Tensor:
        """(B,) tokens of all texts of a row without padding."""
        return self.lengths.sum(dim=1)


class RankingRewardModule(RewardModule):
    """Trains a reward model on rankings: answers of a better rank should get a higher score.

    All answers to a prompt are scored in the same forward pass. The loss is the mean over prompts, however many answers
    they have. ``pair_accuracy`` is the mean over prompts of the fraction of pairs with different ranks that are ordered
    correctly, and ``top_1_accuracy`` the fraction of prompts whose highest score belongs to the best answer, or to one
    of several that are tied. Equal scores are wrong. The 95 % interval counts prompts, because the pairs of a prompt
    are not independent.

    Args:
        reward_model: initial model: directory, hub id or ``FromConfig``. A language model gets a new head.
        loss: loss of a ranking from its scores.
        **kwargs: arguments of :class:`~lightning_rlhf.RewardModule`.
    """

    reads = RankingBatch
    loss: Any  # of rankings instead of pairs

    def __init__(self, reward_model: str | ModelSource, loss: RankingLoss = AllPairsLoss(), **kwargs: Any) -> None:
        super().__init__(reward_model, **kwargs)
        self.loss = loss

    def setup(self, stage: str) -> None:
        """Raise for a ranking whose loss cannot be computed, before any model is loaded."""
        super().setup(stage)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        for examples in getattr(data, "examples", {}).values():
            for ranks in {tuple(example.ranks) for example in examples}:
                self.loss.check(ranks)

    def row_scores(self, rows: RankingBatch) -> Sequence[Tensor]:  # type: ignore[override]
        """Return the (B, K) scores of the texts from one forward pass, 0 without a text, and the ranks."""
        scores = self.scores_of(concat_texts([rows.texts]))
        table = scores.new_zeros(rows.ranks.shape).masked_scatter(rows.ranks > 0, scores)
        return table, rows.ranks

    def losses(  # type: ignore[override]
        self, rows: RankingBatch, scores: Sequence[Tensor], means: MeanAccumulator, prefix: str
    ) -> Tensor:
        """Return (B,) the loss of each ranking, nats."""
        losses: Tensor = self.loss(*scores)
        order = Order.of(*scores)
        means.add(f"{prefix}/loss", losses)
        means.add(f"{prefix}/pair_accuracy", order.correct_fraction)
        means.add(f"{prefix}/score_margin", order.margin)
        means.add(f"{prefix}/top_1_accuracy", order.top_1.float())
        return losses

    def log_odds(self, scores: Sequence[Tensor]) -> Tensor:
        """Return (pairs,) differences of the scores of all pairs with different ranks."""
        return _differences(scores[0])[is_above(scores[1])]

    def on_validation_epoch_start(self) -> None:
        """Begin the metrics of all held-out rankings."""
        options = over(self.data_ranks)
        self._held_out = (  # a tuple, because strategies would shard metrics that are submodules
            RankingAccuracy(**options).to(self.device),
            PairCalibrationError(**options).to(self.device),
        )

    def validation_step(self, batch: RankingBatch, batch_idx: int) -> None:
        """Log loss and accuracy of held-out rankings, the mean over rankings."""
        means = MeanAccumulator()
        scores = self.micro_batches.map(self.row_scores, batch)
        self.losses(batch, scores, means, "val")
        self.log_validation(means, torch.tensor(len(batch), device=self.device), bar="val/pair_accuracy")
        accuracy, calibration = self._held_out
        order = Order.of(*scores)
        accuracy.update(order.correct_fraction, order.pairs)
        calibration.update(self.log_odds(scores))

    def on_validation_epoch_end(self) -> None:
        """Log the numbers of held-out rankings and pairs, the interval of their accuracy, and the calibration error."""
        accuracy, calibration = self._held_out
        counted = accuracy.compute()
        metrics = {
            "rankings": counted["rankings"],
            "pairs": counted["pairs"],
            "pair_accuracy_low": counted["low"],
            "pair_accuracy_high": counted["high"],
            "pair_calibration_error": calibration.compute(),
        }
        for name, value in metrics.items():
            self.log(f"val/{name}", value, batch_size=1)


@dataclass(frozen=True)
class Order:
    """How scores order the answers of B rankings.

    Args:
        pairs: (B,) number of pairs of answers with different ranks.
        correct_fraction: (B,) fraction of them in which the better answer has the higher score.
        margin: (B,) mean difference of their scores, score units.
        top_1: (B,) bool, whether an answer of rank 1 has a higher score than all of other ranks.
    """

    pairs: Tensor
    correct_fraction: Tensor
    margin: Tensor
    top_1: Tensor

    @classmethod
    def of(cls, scores: Tensor, ranks: Tensor) -> Order:
        """Compare scores with ranks.

        Args:
            scores: (B, K) score of each answer.
            ranks: (B, K) int64, 1 for the best answer, 0 without one.
        """
        above, difference = is_above(ranks), _differences(scores)
        pairs = above.sum(dim=(1, 2))
        correct = (above & (difference > 0)).sum(dim=(1, 2))
        margin = difference.masked_fill(~above, 0).sum(dim=(1, 2)) / pairs
        best = scores.masked_fill(ranks != 1, -torch.inf).amax(dim=1)
        others = scores.masked_fill(ranks <= 1, -torch.inf).amax(dim=1)
        return cls(pairs, correct / pairs, margin, best > others)


def _differences(scores: Tensor) -> Tensor:
    """Return (B, K, K) score of the first answer minus score of the second."""
    return scores.unsqueeze(2) - scores.unsqueeze(1)


class RankingAccuracy(Metric):
    """Mean over rankings of the fraction of pairs that a score orders correctly, with its 95 % interval (Wilson).

    The interval counts each ranking once. It is too wide rather than too narrow: the fraction of several pairs varies
    less than that of one.

    Args:
        options: arguments of :class:`torchmetrics.Metric`.
    """

    full_state_update = False
    higher_is_better = True
    counts: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("counts", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")  # correct, rankings, pairs

    def update(self, correct_fraction: Tensor, pairs: Tensor) -> None:
        """Add rankings.

        Args:
            correct_fraction: (N,) fraction of the pairs of each ranking that are ordered correctly.
            pairs: (N,) number of its pairs.
        """
        rankings = torch.tensor(len(pairs), device=self.device)
        self.counts += torch.stack([correct_fraction.double().sum(), rankings, pairs.sum()])

    def compute(self) -> dict[str, float]:
        """Return ``rankings``, ``pairs``, ``accuracy``, and the bounds ``low`` and ``high``. Without rankings, NaN."""
        correct, rankings, pairs = self.counts.tolist()
        if not rankings:
            return {"rankings": 0.0, "pairs": 0.0, "accuracy": torch.nan, "low": torch.nan, "high": torch.nan}
        correct = min(correct, rankings)  # rounding of a sum of fractions
        low, high = wilson_interval(correct, rankings)
        return {"rankings": rankings, "pairs": pairs, "accuracy": correct / rankings, "low": low, "high": high}
