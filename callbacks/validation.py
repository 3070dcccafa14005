"""What a validation gathers over its batches, and the metrics it makes of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.functional.diagnostics import ordered_share, pass_at_k
from lightning_rlhf.modules.sums import Sums
from lightning_rlhf.types import PromptBatch, Rollout

_KEPT_SAMPLES = 64


class Validation:
    """Responses of one validation: for each prompt one greedy one, then ``val_samples`` sampled ones.

    Args:
        metric: reward that says that a response is correct (at least 1); None where none does.
        val_samples: sampled responses per prompt.
    """

    def __init__(self, metric: str | None, val_samples: int) -> None:
        self._metric, self._val_samples = metric, val_samples
        self._sums = Sums()
        self._correct: list[Tensor] = []
        self._scores: list[Tensor] = []
        self.samples: list[dict[str, Any]] = []

    def add(self, batch: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
        """One batch of N prompts and N x (1 + val_samples) responses."""
        for name, values in rollout.rewards.items():
            for kind, part in self._parts(values).items():
                self._sums.add(f"val/{name}_{kind}", part, ~part.isnan())
        lengths, truncated = self._parts(rollout.response_lengths.float()), self._parts(rollout.truncated.float())
        self._sums.add("val/response_tokens_mean", lengths["sampled"])
        self._sums.add("val/truncated_fraction", truncated["sampled"])
        if self._metric is not None:
            judged = rollout.rewards[self._metric]
            correct = self._parts((judged >= 1).float().masked_fill(judged.isnan(), torch.nan))
            self._correct.append(correct["sampled"])
            for kind, part in correct.items():
                self._sums.add(f"val/{kind}", part, ~part.isnan())
        size = 1 + self._val_samples
        for i in range(min(len(batch), _KEPT_SAMPLES - len(self.samples))):
            row = i * size
            ids = rollout.response_ids[row, : rollout.response_lengths[row]]
            self.samples.append(
                {
                    "prompt": batch.texts[i],
                    "response": tokenizer.decode(ids, skip_special_tokens=True),
                    **{name: values[row].item() for name, values in rollout.rewards.items()},
                    **{name: column[i] for name, column in batch.columns.items()},
                }
            )

    def add_scores(self, scores: Tensor) -> None:
        """The reward model's scores of the responses added last."""
        parts = self._parts(scores.cpu())
        self._scores.append(parts["sampled"])
        for kind, part in parts.items():
            self._sums.add(f"val/score_{kind}", part)

    def metrics(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """All metrics; the share of correct ones, pass@k and the ordering need a reward that says what is correct."""
        found = self._sums.means(reduce)
        if self._correct:
            judged = torch.cat(self._correct)
            correct = judged[~judged.isnan().any(dim=1)].sum(dim=1).int().tolist()
            k = 2
            while k <= self._val_samples:
                values = torch.tensor([pass_at_k(self._val_samples, c, k) for c in correct])
                sums = Sums()
                sums.add(f"val/pass@{k}", values)
                found |= sums.means(reduce)
                k *= 2
            if self._scores:
                scores = torch.cat(self._scores)  # the share is NaN where all are right or all are wrong
                found["val/score_orders_right_first"] = ordered_share(scores[judged == 1], scores[judged == 0])
        return found

    def _parts(self, values: Tensor) -> dict[str, Tensor]:
        table = values.view(-1, 1 + self._val_samples)
        return {"greedy": table[:, :1], "sampled": table[:, 1:]}
