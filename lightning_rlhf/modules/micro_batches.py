"""MicroBatches: forward passes and updates of a batch in micro-batches, the same number of them on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.expected_errors import NonFiniteError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.modules.metrics import MeanAccumulator, UpdateResult
from lightning_rlhf.modules.text_layout import TextLayout
from lightning_rlhf.strategies.roles import RoleStrategy
from lightning_rlhf.types import AllowedTokens, TensorBatch

SummedLoss = Callable[[Any, MeanAccumulator], Tensor]  # rows to their summed loss; adds metrics of the rows


@dataclass(frozen=True)
class MicroBatches:
    """Computes on batches in micro-batches, which determine memory and speed but no result.

    A sharded forward pass needs all ranks. Therefore a rank with fewer micro-batches repeats one row as a filler, whose
    results are ignored.

    Args:
        layout: layout of the texts, which splits a batch.
        device: device of the models.
    """

    layout: TextLayout
    strategy: RoleStrategy
    device: torch.device

    @property
    def ranks(self) -> DataRanks:
        """The ranks that have different data."""
        return self.strategy.data_ranks

    def split(self, batch: TensorBatch) -> list[tuple[Tensor, bool]]:
        """Return the indices of the rows of each micro-batch, and whether it is a filler. All ranks.

        Args:
            batch: rows of this rank, at least one, with ``total_lengths``.
        """
        micro_batches = self.layout.split(batch)
        most = len(micro_batches)
        if self.ranks.size > 1:
            most = int(self.ranks.max(torch.tensor(float(most), device=self.device)))
        fillers = [(micro_batches[-1][:1], True)] * (most - len(micro_batches))
        return [*((indices, False) for indices in micro_batches), *fillers]

    def map(self, function: Callable[[Any], Sequence[Any]], batch: TensorBatch) -> list[Any]:
        """Apply a function to micro-batches and return each of its results for the whole batch, in order. All ranks.

        Args:
            function: rows to tensors, or allowed tokens, with one entry per row; a result may be None for all rows.
            batch: rows of this rank.
        """
        micro_batches = self.split(batch)
        outputs = [function(batch[indices]) for indices, _ in micro_batches]
        parts = [indices for indices, filler in micro_batches if not filler]
        order = torch.argsort(torch.cat(parts))
        columns = zip(*outputs[: len(parts)], strict=True)
        return [None if column[0] is None else _joined(column)[order.to(column[0].device)] for column in columns]

    @torch.no_grad()
    def measure(self, batch: TensorBatch, summed_loss: SummedLoss) -> MeanAccumulator:
        """Compute the metrics of a loss on a validation batch, without gradients. All ranks."""
        means = MeanAccumulator()
        for indices, filler in self.split(batch):
            summed_loss(batch[indices], MeanAccumulator() if filler else means)
        return means

    def update(
        self, role: str, batch: TensorBatch, summed_loss: SummedLoss, denominator: Tensor, max_grad_norm: float | None
    ) -> UpdateResult:
        """Take one optimizer step of one role; see :meth:`RoleModule.update`. All ranks.

        Args:
            role: name of a trained role.
            batch: rows of this rank, at least one, with ``total_lengths``.
            summed_loss: summed loss of some rows, with gradient; adds metrics of them.
            denominator: () divisor of the sum, counted over the mini-batch and all ranks, positive.
            max_grad_norm: global norm that the gradient is clipped to; None does not clip.

        Raises:
            FloatingPointError: the gradient's norm is not finite; this role's weights are as before.
        """
        means = MeanAccumulator()
        scale = self.strategy.gradient_scale / float(denominator)
        micro_batches = self.split(batch)
        for number, (indices, filler) in enumerate(micro_batches):
            with self.strategy.accumulate(role, sync=number == len(micro_batches) - 1):
                with self.strategy.saved_activations(role):
                    loss = summed_loss(batch[indices], MeanAccumulator() if filler else means)
                self.strategy.backward_role(role, loss * (0.0 if filler else scale))
        norm = self.strategy.clip_role(role, max_grad_norm)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the {role}'s gradient norm is {float(norm)} at step {self.strategy.module.trainer.global_step}; its "
                f"weights were not changed. Lower the learning rate, or look at this step's rewards and "
                f"log-probabilities"
            )
        # Momentum alone would change the weights. An entropy bonus or KL loss counts rejected tokens, so norm > 0 then.
        if norm == 0 and means.all_rejected(self.ranks):
            self.strategy.drop_gradients(role)
            return UpdateResult(norm, means, stepped=False)
        self.strategy.step_role(role)
        return UpdateResult(norm, means)


def _joined(parts: Sequence[Any]) -> Any:
    """Return the rows of several micro-batches together."""
    return AllowedTokens.join(parts) if isinstance(parts[0], AllowedTokens) else torch.cat(list(parts))
