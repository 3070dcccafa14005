"""Corrections for tokens that were sampled from another policy than the trained one: weights, rejections, metrics."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.functional.data_ranks import ONE_RANK, DataRanks
from lightning_rlhf.functional.mismatch import (
    LOG_BOUND,
    effective_fraction,
    means_over_ranks,
    mismatch_metrics,
    response_mean,
    spread_metrics,
    train_rollout_log_ratio,
)
from lightning_rlhf.objectives.rejections import Rejection
from lightning_rlhf.ranges import check_ranges

Parts = dict[str, tuple[Tensor, Tensor]]  # values and the mask of those that count, of each metric


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights or rejects tokens that were sampled from another policy than the one in training.

    The rollout policy differs from the actor because of the engine's kernels and precision, and because of staleness.
    By default you only get metrics of this gap.

    With l = log(train / rollout) of a token, clamped to [-20, 20], the ratio at each level is

        token        exp(l)
        sequence     exp(sum of l over the response), the sum clamped in the same way
        geometric    exp(mean of l over the response)

    The weight is the ratio truncated to the bounds (TIS, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", Yao et al. 2025), or 0 outside them (IcePop, "Every Step Evolves", Ling Team 2025). It multiplies the
    loss of a token. A token of weight 0 still counts in the denominator, but a rejected token does not.

    verl's presets are class methods of ``lightning_rlhf.extras.algorithms.verl_corrections.VerlCorrection``. In YAML,
    ``class_path`` may name a class or a class method.

    Args:
        level: level of the ratio that is the weight. None gives every token weight 1.
        upper: upper bound of the ratio, positive. ``.inf`` sets none.
        lower: lower bound of the ratio, in [0, upper]. None is 0.
        mode: what happens to a ratio out of bounds. ``truncate`` moves it to the bound, ``mask`` to 0.
        batch_normalize: whether weights are divided by their mean over the accepted tokens (``token``) or responses
            (other levels), on all ranks.
        rejections: rules that reject tokens. A token is accepted if all rules accept it.
        bypass: whether the rollout's log-probabilities replace the actor's before the first update. This saves an
            evaluation of the actor. Clipping then also reacts to the numerical gap between engine and trainer, and
            ``rollout_corr/kl_k3`` mixes this gap with the change by your updates. The ratio of a
            clipped policy loss is then train / rollout already and needs no weights (``level`` None). A plain policy
            gradient uses no ratio, so it needs them. Weights and rejections depend on the current actor: call
            :meth:`of_rows` with its log-probabilities for each micro-batch. A token rejected there still counts in the
            denominator, which was fixed before, and in the entropy bonus and the KL loss. An update in which all tokens
            are rejected is left out, unless bonus or KL loss give a gradient.
    """

    level: Literal["token", "sequence", "geometric"] | None = None
    upper: float = 2.0
    lower: float | None = None
    mode: Literal["truncate", "mask"] = "truncate"
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    bypass: bool = False

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", "geometric", None):
            raise UsageError(f"level must be token, sequence, geometric or null, got {self.level!r}")
        if self.mode not in ("truncate", "mask"):
            raise UsageError(f"mode must be truncate or mask, got {self.mode!r}")
        check_ranges(self, upper="positive")
        if self.lower is not None and not 0 <= self.lower <= self.upper:
            raise UsageError(f"lower must lie in [0, upper], got {self.lower} with upper {self.upper}")
        if self.batch_normalize and (self.level is None or self.bypass):
            raise UsageError("batch_normalize needs a level, and does not work with bypass, which weighs micro-batches")
        names = [rejection.name for rejection in self.rejections]
        if len(set(names)) < len(names):
            raise UsageError(f"rejections must differ in statistic or level, got {', '.join(names)}")

    @property
    def only_measures(self) -> bool:
        """Whether only metrics are computed, so that weights and accepted tokens do not depend on log-probs."""
        return self.level is None and not self.rejections and not self.bypass

    def __call__(
        self,
        old_logprobs: Float[Tensor, "B T"],
        rollout_logprobs: Float[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        ranks: DataRanks = ONE_RANK,
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Weights, accepted tokens and metrics of a whole batch.

        Metrics are :func:`~lightning_rlhf.functional.mismatch.mismatch_metrics`, then of the weights before batch
        normalisation and of each rejection, all over the tokens of ``mask``, rejected ones included.

        Args:
            old_logprobs: log-probabilities of the actor before the first update.
            rollout_logprobs: log-probabilities of the engine at sampling time.
            mask: policy tokens.
            ranks: ranks that hold the other rows.

        Returns:
            weights: (B, T) weight of each token in the dtype of ``old_logprobs``, without gradient, 0 where the mask is
                False.
            accepted: (B, T) bool, the mask without rejected tokens.
            metrics: ``rollout_corr/<name>`` to a number, NaN where no token counts.
        """
        log_ratio = train_rollout_log_ratio(old_logprobs, rollout_logprobs, mask)
        weights, accepted = self._weights(log_ratio, mask), self._accepted(log_ratio, mask)
        metrics = mismatch_metrics(old_logprobs, rollout_logprobs, mask, ranks)
        metrics |= self._metrics(log_ratio, mask, weights, accepted, ranks)
        if self.batch_normalize:
            factor = self._batch_mean(weights, accepted, ranks)
            weights = weights / factor
            metrics["rollout_corr/batch_norm_factor"] = factor
        return weights.to(old_logprobs.dtype), accepted, metrics

    def _batch_mean(self, weights: Tensor, accepted: Tensor, ranks: DataRanks) -> float:
        """Return the mean weight of accepted tokens or responses over all ranks; 1 if all weights are 0 or none is."""
        counted = (weights, accepted)
        if self.level != "token":
            counted = (response_mean(weights, accepted), accepted.any(dim=1))
        mean = means_over_ranks({"weights": counted}, ranks)["weights"]
        return mean if mean > 1e-8 else 1.0

    def of_rows(self, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and accepted tokens of some rows, as :meth:`__call__`, without normalisation and metrics."""
        log_ratio = train_rollout_log_ratio(logprobs, rollout_logprobs, mask)
        return self._weights(log_ratio, mask).to(logprobs.dtype), self._accepted(log_ratio, mask)

    def _log_level_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Log of the ratio: (B, T) if each token has one, else (B, 1)."""
        if self.level == "sequence":
            return log_ratio.sum(dim=1, keepdim=True).clamp(-LOG_BOUND, LOG_BOUND)
        if self.level == "geometric":
            return response_mean(log_ratio, mask).unsqueeze(1)
        return log_ratio

    def _weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        if self.level is None:
            return mask.double()
        ratio = self._log_level_ratio(log_ratio, mask).exp()
        weights = ratio.clamp(self.lower or 0.0, self.upper)
        if self.mode == "mask":
            weights = torch.where(weights == ratio, ratio, 0.0)
        return weights.expand(mask.shape).masked_fill(~mask, 0)

    def _accepted(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        accepted = mask
        for rejection in self.rejections:
            accepted = accepted & rejection.keep(log_ratio, mask)
        return accepted

    def _metrics(
        self, log_ratio: Tensor, mask: Tensor, weights: Tensor, accepted: Tensor, ranks: DataRanks
    ) -> dict[str, float]:
        dropped, rows = mask & ~accepted, mask.any(dim=1)
        fractions: Parts = {}
        spreads: Parts = {}
        if self.level is not None:
            fractions |= self._outside(log_ratio, mask)
            spreads |= {"weight": (weights, mask), "sequence_weight": (response_mean(weights, mask), rows)}
        for rejection in self.rejections:
            units = mask if rejection.level == "token" else rows
            spreads[rejection.name] = rejection.values(log_ratio, mask), units
            fractions |= _rejected(rejection, log_ratio, mask)
        fractions |= {"rejected_fraction": (dropped, mask), "rejected_sequence_fraction": (dropped.any(dim=1), rows)}
        metrics = means_over_ranks(fractions, ranks)
        if spreads:
            metrics |= spread_metrics(spreads, ranks)
        if self.level is not None:
            metrics["weight_ess"] = effective_fraction(metrics["weight_mean"], metrics["weight_std"])
        return {f"rollout_corr/{name}": value for name, value in metrics.items()}

    def _outside(self, log_ratio: Tensor, mask: Tensor) -> Parts:
        """Return which ratios are out of bounds; without a lower one, which are below the inverse of the upper one."""
        reported_low = 1 / self.upper if self.lower is None else self.lower  # as verl reports; weights have 0
        ratio, rows = self._log_level_ratio(log_ratio, mask).exp(), mask.any(dim=1)
        response_ratio = response_mean(ratio.expand(mask.shape), mask)
        units = mask if self.level == "token" else rows.unsqueeze(1)
        outside = (ratio > self.upper) | (ratio < (self.lower or 0.0))
        return {
            "above_fraction": (ratio > self.upper, units),
            "below_fraction": (ratio < reported_low, units),
            "sequence_above_fraction": (response_ratio > self.upper, rows),
            "sequence_below_fraction": (response_ratio < reported_low, rows),
            "outside_fraction": (outside.expand(mask.shape), mask),  # of tokens at every level
        }


def _rejected(rejection: Rejection, log_ratio: Tensor, mask: Tensor) -> Parts:
    """Return which values of a rejection are out of its bounds, and which tokens and responses it rejects alone."""
    name = rejection.name
    low, high = rejection.bounds
    values = rejection.values(log_ratio, mask)
    rows = mask.any(dim=1)
    units = mask if rejection.level == "token" else rows
    dropped = mask & ~rejection.keep(log_ratio, mask)
    return {
        f"{name}_above_fraction": (values > high, units),
        f"{name}_below_fraction": (values < low, units),
        f"{name}_rejected_fraction": (dropped, mask),
        f"{name}_rejected_sequence_fraction": (dropped.any(dim=1), rows),
    }
