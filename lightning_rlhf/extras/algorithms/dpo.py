"""Direct preference optimization: training on preference pairs, without reward model and sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from typing_extensions import override

from lightning_rlhf.batching.sequences import concat_texts
from lightning_rlhf.data.preferences import PreferenceDataModule
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.extras.algorithms.preference_losses import DirectLoss, DPOLoss, IPOLoss
from lightning_rlhf.extras.algorithms.start_logprobs import StartLogprobs
from lightning_rlhf.models.loading import ModelSource
from lightning_rlhf.modules.algorithms import with_defaults
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.modules.pairs import PairModule
from lightning_rlhf.modules.texts import text_scores
from lightning_rlhf.ranges import check_range
from lightning_rlhf.types import SequenceBatch

log = logging.getLogger(__name__)


class DPOModule(PairModule):
    """Trains a policy on preference pairs, to prefer what people prefer more than the frozen reference does.

    You need no reward model and no sampling. In validation, held-out pairs are ordered by the reward that the policy
    implies, ``beta`` times the log-ratio to the reference.
    See "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", Rafailov et al. 2023.

    Args:
        actor: policy to train: directory, hub id or ``FromConfig``.
        ref: frozen reference. None takes the actor's source. With LoRA that is the actor without its adapters, and no
            second copy is loaded. With ``start``, the actor evaluates all rows before the first update, and these
            log-probs are the reference. You then need no second copy, and from two epochs on fewer forward passes. The
            checkpoint contains the log-probs. With ``none`` there is no reference, and log-probs take the place of
            log-ratios. Losses such as SimPO use none anyway.
        loss: loss of a pair from its log-ratios.
        optimizer: factory that makes the optimizer from the policy's parameters.
        lr_scheduler: factory of its scheduler, stepped once per batch. None keeps the rate constant.
        sft_coef: weight of the supervised loss of the preferred response, its mean over tokens, at least 0. See
            "Iterative Reasoning Preference Optimization", Pang et al. 2024, equation 1.
        **kwargs: arguments of :class:`~lightning_rlhf.modules.role_module.RoleModule`.
    """

    trained_roles = ("actor",)
    uses_frozen_in_updates = True

    def __init__(
        self,
        actor: str | ModelSource,
        ref: str | ModelSource | None = None,
        loss: DirectLoss = DPOLoss(),
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        sft_coef: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("sft_coef", sft_coef, "at least 0")
        if not loss.uses_reference and ref not in (None, "none"):
            raise UsageError(f"{type(loss).__name__} uses no reference: remove ref, got {ref!r}")
        self.has_reference = loss.uses_reference and ref != "none"
        self.start_logprobs = StartLogprobs() if self.has_reference and ref == "start" else None
        self.evaluates_reference = self.has_reference and ref != "start"
        reference = actor if ref is None else ref
        self.set_sources(actor=actor, ref=reference if self.evaluates_reference else None)
        lora = self.sources["actor"].lora
        if self.start_logprobs is not None and lora is not None and lora.dropout:
            raise UsageError(
                f"ref: start would evaluate the reference with the dropout {lora.dropout} of lora: remove one"
            )
        self.sft_coef = sft_coef
        self.loss: Any = loss
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    def setup(self, stage: str) -> None:
        """Validate the settings, and name a term of the paper that a loss trains without."""
        super().setup(stage)
        needs_supervised = getattr(self.loss, "needs_supervised", False)  # losses of KTO and of users have no such term
        if stage == "fit" and needs_supervised and not self.sft_coef and self.trainer.is_global_zero:
            log.warning(
                "%s trains without the supervised term of its paper: set sft_coef: 1.0 to add it",
                type(self.loss).__name__,
            )

    @classmethod
    @override
    def unused(cls, data: Any) -> list[str]:
        """Margins are for reward models."""
        if not isinstance(data, PreferenceDataModule):
            return []
        count = sum(bool(margin) for examples in data.examples.values() for _, _, margin in examples)
        if not count:
            return []
        rows = "1 row has" if count == 1 else f"{count} rows have"
        return [f"{rows} a margin, which {cls.__name__} does not use: its losses have none; RewardModule uses margins"]

    def row_scores(self, rows: Any) -> Sequence[Tensor]:
        """Return (B,) log-ratios of the preferred responses and of the others, then the actor's log-probs of them."""
        log_ratios, logprobs = self.answer_scores(concat_texts([rows.chosen, rows.rejected]))
        return (*log_ratios.chunk(2), *logprobs.chunk(2))

    def on_train_start(self) -> None:
        """Evaluate all rows with ``ref: start``, unless a checkpoint has their log-probs. All ranks."""
        super().on_train_start()
        self._measure_start()

    def on_validation_start(self) -> None:
        """Evaluate all rows with ``ref: start`` in a validation before training. All ranks."""
        super().on_validation_start()
        self._measure_start()

    def _measure_start(self) -> None:
        if self.start_logprobs is None or self.start_logprobs:
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        actor: Any = self.actor
        was_training = actor.training
        actor.eval()
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            self.start_logprobs.measure(data, self.data_ranks.rank, self.data_ranks.size, self._evaluated)
        actor.train(was_training)

    def _evaluated(self, batch: Any) -> tuple[SequenceBatch, Tensor]:
        """Return the texts of some pairs, and (2 B,) their log-probs under the actor. All ranks."""
        batch = batch.to(self.device)
        scores = self.micro_batches.map(self.row_scores, batch)
        return concat_texts([batch.chosen, batch.rejected]), torch.cat(scores[2:])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the log-probs of ``ref: start``."""
        super().on_save_checkpoint(checkpoint)
        if self.start_logprobs:
            checkpoint["start_logprobs"] = self.start_logprobs.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the log-probs of ``ref: start``.

        Raises:
            ValueError: the checkpoint has none, because its run had another reference.
        """
        super().on_load_checkpoint(checkpoint)
        if self.start_logprobs is None:
            return
        if "start_logprobs" not in checkpoint:
            raise UsageError(
                "the checkpoint has no log-probs for ref: start, because its run had another ref: set that one, or "
                "start a new run from an export"
            )
        self.start_logprobs.load(checkpoint["start_logprobs"])

    def answer_scores(self, texts: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return (B,) each response's log-ratio of actor to reference, and the actor's log-prob. All ranks.

        Without a reference, the log-prob takes the place of the log-ratio; its mean over tokens, if the loss uses that.
        """
        reference: Tensor | float = 0.0
        if self.evaluates_reference:
            with torch.no_grad():
                reference = text_scores(self, "ref", texts)[0].logprobs.sum(dim=1)
        logprobs = text_scores(self, "actor", texts)[0].logprobs.sum(dim=1)
        if self.start_logprobs:
            reference = self.start_logprobs.of(texts).to(logprobs.dtype)
        if not self.has_reference and self.loss.length_normalized:
            return logprobs / _tokens(texts), logprobs
        return logprobs - reference, logprobs

    def losses(self, rows: Any, scores: Sequence[Tensor], means: MeanAccumulator, prefix: str) -> Tensor:
        """Return (B,) the loss of each pair."""
        ratios, logprobs = scores[:2], scores[2:]
        if self.loss.length_normalized and self.has_reference:
            ratios = [ratio / _tokens(texts) for ratio, texts in zip(ratios, (rows.chosen, rows.rejected), strict=True)]
        losses: Tensor = self.loss(*ratios)
        if self.sft_coef > 0:
            supervised = -logprobs[0] / _tokens(rows.chosen)
            means.add(f"{prefix}/sft_loss", supervised)
            losses = losses + self.sft_coef * supervised
        means.add(f"{prefix}/loss", losses)
        means.add(f"{prefix}/pair_accuracy", (scores[0] > scores[1]).float())
        means.add(f"{prefix}/score_margin", self.log_odds(scores))
        for name, ratio, logprob in zip(("chosen", "rejected"), scores[:2], logprobs, strict=True):
            means.add(f"{prefix}/reward_{name}", self.loss.beta * ratio)
            means.add(f"{prefix}/logprob_{name}", logprob)
        return losses

    def log_odds(self, scores: Sequence[Tensor]) -> Tensor:
        """Return (B,) differences of the implicit rewards."""
        difference: Tensor = self.loss.beta * (scores[0] - scores[1])
        return difference

    def build_role(self, name: str) -> nn.Module:
        """Build a language model."""
        return self.sources[name].causal()

    def optimizer_of(self, name: str) -> tuple[Any, Any]:
        """Return the optimizer and scheduler factories."""
        return self.optimizer, self.lr_scheduler


def _tokens(texts: SequenceBatch) -> Tensor:
    """Return (B,) the number of tokens of each response, at least 1."""
    return texts.loss_mask.sum(dim=1).clamp(min=1)


@with_defaults(loss=IPOLoss())
class IPOModule(DPOModule):
    """Identity preference optimization: DPO that moves a pair's log-ratios a fixed distance apart, and no further.

    Use it if annotators agree on many of your pairs, because DPO then increases the distance without bound.
    See "A General Theoretical Paradigm to Understand Learning from Human Preferences", Azar et al. 2023.
    """
