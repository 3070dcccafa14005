"""Metrics of a validation, over all of its batches and ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data_ranks import DataRanks
from lightning_rlhf.functional.diagnostics import best_at_k, majority_at_k, ordered_share, pass_at_k, worst_at_k
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.types import PromptBatch, Rollout

log = logging.getLogger(__name__)
Answer = Callable[[list[str]], Sequence[Hashable]]
_KEPT_SAMPLES = 64
_SOURCE_COLUMNS = ("source", "data_source")  # ours, then verl's
_MOST_SOURCES = 32
_CORRECT, _SCORE = "correct, by the metric", "score"  # not valid as names of reward functions


class Validation:
    """Responses of one validation: for each prompt one greedy one, then N = ``val_samples`` sampled ones.

    Of every reward, and of the reward model's score: the mean of greedy and sampled responses, the standard deviation
    of a prompt's samples, and the reward of the best, the worst and the most frequent answer of k samples, for k = 2,
    4, 8, ... and N. These are exact means over all draws of k of the N, so they are unbiased and not random. A
    truncated response counts with its reward. A response without a reward (NaN) is left out of the means, and its
    prompt out of the statistics that compare a prompt's samples.

    All prompts have the same weight; the samples of a prompt are on one rank.

    Args:
        val_samples: N, at least 1.
        rewards: names of all reward functions.
        metric: name of the reward that is at least 1 for correct responses; None without one.
        answer: function from completions to their answers, None without one; equal answers are counted.
        sources: values of ``source`` or ``data_source`` in the data; each has separate metrics.
        scored: whether there are scores of a reward model.
    """

    def __init__(
        self,
        val_samples: int,
        rewards: Sequence[str] = (),
        metric: str | None = None,
        answer: Answer | None = None,
        sources: Sequence[str] = (),
        scored: bool = False,
    ) -> None:
        self._val_samples = val_samples
        self._metric = metric
        self._answer = answer
        self._sources = list(sources)
        names = ([] if metric is None else [_CORRECT]) + list(rewards) + ([_SCORE] if scored else [])
        # Every rank has all names, so that it reduces the same values even without any prompt.
        empty = torch.empty(0, 1 + val_samples, dtype=torch.float64)
        self._rewards = {name: [empty] for name in names}
        self._lengths, self._truncated = [empty], [empty]
        self._answers: list[Sequence[Hashable]] = []
        self._source_of: list[int] = []
        self.samples: list[dict[str, Any]] = []

    def add(self, batch: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
        """Add a batch of B prompts with B x (1 + N) responses."""
        for name, values in rollout.rewards.items():
            self._rewards[name].append(self._table(values))
        self._lengths.append(self._table(rollout.response_lengths))
        self._truncated.append(self._table(rollout.truncated))
        if self._metric is not None:
            reward = rollout.rewards[self._metric]
            self._rewards[_CORRECT].append(self._table((reward >= 1).double().masked_fill(reward.isnan(), torch.nan)))
        columns = [{name: values[i] for name, values in batch.columns.items()} for i in range(len(batch))]
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(self._sources)}
        self._source_of += [numbers.get(source_of(row), -1) for row in columns]
        ids = [
            row[:length] for row, length in zip(rollout.response_ids, rollout.response_lengths.tolist(), strict=True)
        ]
        texts, size = tokenizer.batch_decode(ids, skip_special_tokens=True), 1 + self._val_samples
        if self._answer is not None:
            self._answers += [self._answers_of(texts[first + 1 : first + size]) for first in range(0, len(texts), size)]
        for i in range(min(len(batch), _KEPT_SAMPLES - len(self.samples))):
            self.samples.append(
                {
                    **columns[i],  # which may have names such as these
                    "prompt": batch.texts[i],
                    "response": texts[i * size],
                    **{name: values[i * size].item() for name, values in rollout.rewards.items()},
                }
            )

    def add_scores(self, scores: Tensor) -> None:
        """Add the reward model's scores of the responses that were added last."""
        self._rewards[_SCORE].append(self._table(scores))

    def metrics(self, ranks: DataRanks) -> dict[str, float]:
        """Return all metrics over all ranks, those of a source under ``val/<source>/``. All ranks.

        Args:
            ranks: ranks with different prompts.
        """
        source = torch.tensor(self._source_of, dtype=torch.long)
        groups = {"val/": torch.ones_like(source, dtype=torch.bool)}
        groups |= {f"val/{name}/": source == number for number, name in enumerate(self._sources)}
        tables = {name: torch.cat(parts) for name, parts in self._rewards.items()}
        statistics = {"response_tokens_mean": torch.cat(self._lengths)[:, 1:]}
        statistics["truncated_fraction"] = torch.cat(self._truncated)[:, 1:]
        of_score = set[str]()
        for name, table in tables.items():
            statistics |= (own := self._statistics(name, table))
            if name == _SCORE:
                of_score = set(own)
        means = MeanAccumulator()
        for prefix, rows in groups.items():
            for name, values in statistics.items():
                # NaN rewards did not apply and are left out; a NaN score is a fault and must be visible.
                counted = None if name in of_score else ~values[rows].isnan()
                means.add(f"{prefix}{name}", values[rows], counted)
        metrics = means.means(ranks)
        if {_CORRECT, _SCORE} <= tables.keys():
            metrics |= self._score_order(tables[_SCORE][:, 1:], tables[_CORRECT][:, 1:], source, ranks)
        return metrics

    def _score_order(self, score: Tensor, correct: Tensor, source: Tensor, ranks: DataRanks) -> dict[str, float]:
        """Return the share of (correct, incorrect) pairs of samples that the reward model's score orders correctly."""
        columns = [score, correct, source.unsqueeze(1).double().expand_as(score)]
        table = ranks.gather(torch.stack([column.flatten() for column in columns], dim=1))
        metrics = {}
        for number, prefix in enumerate(["val/", *(f"val/{name}/" for name in self._sources)], start=-1):
            score, correct, _ = (table if number < 0 else table[table[:, 2] == number]).unbind(dim=1)
            # NaN where all are correct or all are incorrect
            share = ordered_share(score[correct == 1], score[correct == 0])
            metrics[f"{prefix}score_orders_right_first"] = share
        return metrics

    def _statistics(self, name: str, table: Tensor) -> dict[str, Tensor]:
        """Return statistics of one reward, the score, or correctness for each prompt, NaN where it does not apply."""
        samples = self._val_samples
        sampled = table[:, 1:]
        complete = (~sampled.isnan().any(dim=1)).tolist()
        rows = sampled.tolist()
        is_correctness = name == _CORRECT
        stem = "" if is_correctness else f"{name}_"
        statistics = {f"{stem}greedy": table[:, :1], f"{stem}sampled": sampled}
        if samples > 1 and not is_correctness:
            deviation = sampled - sampled.mean(dim=1, keepdim=True)
            statistics[f"{stem}sampled_std"] = (deviation**2).mean(dim=1).sqrt()
        for k in draws(samples):
            if is_correctness:
                counts = [0 if math.isnan(sum(row)) else round(sum(row)) for row in rows]
                statistics[f"{stem}pass@{k}"] = _column(partial(pass_at_k, samples, k=k), complete, counts)
            else:
                statistics[f"{stem}best@{k}"] = _column(partial(best_at_k, k=k), complete, rows)
                statistics[f"{stem}worst@{k}"] = _column(partial(worst_at_k, k=k), complete, rows)
            if self._answer is not None:
                statistics[f"{stem}maj@{k}"] = _column(partial(majority_at_k, k=k), complete, self._answers, rows)
        return statistics

    def _answers_of(self, completions: list[str]) -> Sequence[Hashable]:
        assert self._answer is not None
        answers = list(self._answer(completions))
        if len(answers) != len(completions) or not all(isinstance(answer, Hashable) for answer in answers):
            raise RuntimeError(
                f"val_answer returned {answers!r} for {len(completions)} completions, expected one text or number for "
                f"each, or None where a completion gives no answer"
            )
        return answers

    def _table(self, values: Tensor) -> Tensor:
        """Return (responses,) values as (prompts, 1 + N)."""
        return values.detach().cpu().double().view(-1, 1 + self._val_samples)


def draws(val_samples: int) -> list[int]:
    """Return the k of best, worst, maj and pass@k: 2, 4, 8, ... below the number of samples, and that number."""
    return [k for k in (2**power for power in range(1, 64)) if k < val_samples] + [val_samples] * (val_samples > 1)


def sources_in(data: PromptDataModule) -> list[str]:
    """Return the sources of the validation data that have separate metrics; none if there are fewer than two.

    They are the values of the column ``source``, or of verl's ``data_source``. More than 32 different values are not
    treated as sources.

    Args:
        data: data module, of which all validation rows are read, so that every rank returns the same.
    """
    sources = {source_of(example.columns) for example in data.examples.get("val", [])} - {None}
    if len(sources) > _MOST_SOURCES:
        log.info("the validation data has %d sources, too many for separate metrics", len(sources))
        return []
    return sorted(str(name) for name in sources) if len(sources) > 1 else []


def source_of(columns: Mapping[str, Any]) -> str | None:
    """Return the source of a row of the data, if it has one."""
    return next((str(columns[name]) for name in _SOURCE_COLUMNS if columns.get(name) is not None), None)


def _column(function: Callable[..., float], complete: list[bool], *columns: Sequence[Any]) -> Tensor:
    """Apply a function to each prompt; NaN for prompts with a missing reward."""
    rows = zip(complete, *columns, strict=True)
    values = [function(*row) if is_complete else torch.nan for is_complete, *row in rows]
    return torch.tensor(values, dtype=torch.float64)
