"""What a validation gathers over its batches, and the metrics it makes of that."""

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
_CORRECT, _SCORE = "correct, by the metric", "score"  # no names that a reward function may have


class Validation:
    """Responses of one validation: for each prompt one greedy one, then N = ``val_samples`` sampled ones.

    Of every reward, and of the reward model's score: the mean of greedy and sampled responses, the standard deviation
    of a prompt's samples, and what the best, the worst and the majority's answer of k samples earn, for k = 2, 4, 8,
    ... and N. These are exact means over all draws of k of the N, so they are unbiased, and no random number is drawn
    for them. A truncated response counts as what the reward made of it. A reward that does not apply to a response
    (NaN) leaves that response out of the means, and its prompt out of all that compares a prompt's samples.

    All prompts weigh the same, whichever rank they are on; the samples of a prompt are on one rank.

    Args:
        val_samples: N, at least 1.
        rewards: names of all reward functions.
        metric: the one of them that says that a response is correct (at least 1); None where none does.
        answer: from completions to the answers they give, None where one gives none; equal answers vote together.
        sources: names that ``source`` or ``data_source`` take in the data; each has metrics of its own.
        scored: whether a reward model's scores come too.
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
        self._val_samples, self._metric, self._answer, self._sources = val_samples, metric, answer, list(sources)
        judged = ([] if metric is None else [_CORRECT]) + list(rewards) + ([_SCORE] if scored else [])
        # Every rank knows all names, and so reduces the same, even one that was given no prompt.
        empty = torch.empty(0, 1 + val_samples, dtype=torch.float64)
        self._judged = {name: [empty] for name in judged}
        self._lengths, self._truncated = [empty], [empty]
        self._answers: list[Sequence[Hashable]] = []
        self._source_of: list[int] = []
        self.samples: list[dict[str, Any]] = []

    def add(self, batch: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
        """One batch of B prompts and B x (1 + N) responses."""
        for name, values in rollout.rewards.items():
            self._judged[name].append(self._table(values))
        self._lengths.append(self._table(rollout.response_lengths))
        self._truncated.append(self._table(rollout.truncated))
        if self._metric is not None:
            judged = rollout.rewards[self._metric]
            self._judged[_CORRECT].append(self._table((judged >= 1).double().masked_fill(judged.isnan(), torch.nan)))
        columns = [{name: values[i] for name, values in batch.columns.items()} for i in range(len(batch))]
        places: dict[str | None, int] = {name: place for place, name in enumerate(self._sources)}
        self._source_of += [places.get(source_of(row), -1) for row in columns]
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
        """The reward model's scores of the responses added last."""
        self._judged[_SCORE].append(self._table(scores))

    def metrics(self, ranks: DataRanks) -> dict[str, float]:
        """Return all metrics over all ranks, each source's under ``val/<source>/``.

        Args:
            ranks: ranks with different prompts.
        """
        sums, places = MeanAccumulator(), torch.tensor(self._source_of, dtype=torch.long)
        tables = {name: torch.cat(parts) for name, parts in self._judged.items()}
        groups = {"val/": torch.ones_like(places, dtype=torch.bool)}
        groups |= {f"val/{name}/": places == place for place, name in enumerate(self._sources)}
        told = {"response_tokens_mean": torch.cat(self._lengths)[:, 1:]}
        told["truncated_fraction"] = torch.cat(self._truncated)[:, 1:]
        of_score = self._told(_SCORE, tables[_SCORE]) if _SCORE in tables else {}
        for name, table in tables.items():
            told |= of_score if name == _SCORE else self._told(name, table)
        for prefix, rows in groups.items():
            for name, values in told.items():
                # A reward may not apply; a score that is no number is a fault, and is to be seen.
                counts = None if name in of_score else ~values[rows].isnan()
                sums.add(f"{prefix}{name}", values[rows], counts)
        found = sums.means(ranks)
        if {_CORRECT, _SCORE} <= tables.keys():
            columns = [tables[_SCORE][:, 1:], tables[_CORRECT][:, 1:], places.unsqueeze(1).double()]
            columns[2] = columns[2].expand_as(columns[0])
            table = ranks.gather(torch.stack([column.flatten() for column in columns], dim=1))
            for place, prefix in enumerate(groups, start=-1):
                score, correct, _ = (table if place < 0 else table[table[:, 2] == place]).unbind(dim=1)
                # NaN where all are right or all are wrong
                share = ordered_share(score[correct == 1], score[correct == 0])
                found[f"{prefix}score_orders_right_first"] = share
        return found

    def _told(self, name: str, table: Tensor) -> dict[str, Tensor]:
        """What one reward, the score, or the correctness says of each prompt, NaN where it does not apply."""
        correctness = name == _CORRECT
        stem, drawn, sampled = "" if correctness else f"{name}_", self._val_samples, table[:, 1:]
        whole, rows = (~sampled.isnan().any(dim=1)).tolist(), sampled.tolist()
        found = {f"{stem}greedy": table[:, :1], f"{stem}sampled": sampled}
        if drawn > 1 and not correctness:
            off = sampled - sampled.mean(dim=1, keepdim=True)
            found[f"{stem}sampled_std"] = (off**2).mean(dim=1).sqrt()
        for k in draws(drawn):
            if correctness:
                counts = [0 if math.isnan(sum(row)) else round(sum(row)) for row in rows]
                found[f"{stem}pass@{k}"] = _column(partial(pass_at_k, drawn, k=k), whole, counts)
            else:
                found[f"{stem}best@{k}"] = _column(partial(best_at_k, k=k), whole, rows)
                found[f"{stem}worst@{k}"] = _column(partial(worst_at_k, k=k), whole, rows)
            if self._answer is not None:
                found[f"{stem}maj@{k}"] = _column(partial(majority_at_k, k=k), whole, self._answers, rows)
        return found

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
        """(prompts, 1 + N) of (responses,)."""
        return values.detach().cpu().double().view(-1, 1 + self._val_samples)


def draws(val_samples: int) -> list[int]:
    """The k of best, worst, majority and pass@k: 2, 4, 8, ... below the number of samples, and that number."""
    return [k for k in (2**power for power in range(1, 64)) if k < val_samples] + [val_samples] * (val_samples > 1)


def sources_in(data: PromptDataModule) -> list[str]:
    """Names of the data's sources, by which validation is split; none where there are not two.

    They are the values of the column ``source``, or of verl's ``data_source``. More than 32 are taken for a description
    of each row and not for sources.

    Args:
        data: whose validation rows are looked at, all of them, so that every rank finds the same.
    """
    found = {source_of(example.columns) for example in data.examples.get("val", [])} - {None}
    if len(found) > _MOST_SOURCES:
        log.info("the validation data names %d sources: too many for metrics of their own", len(found))
        return []
    return sorted(str(name) for name in found) if len(found) > 1 else []


def source_of(columns: Mapping[str, Any]) -> str | None:
    """The source that a row of the data names, if it does."""
    return next((str(columns[name]) for name in _SOURCE_COLUMNS if columns.get(name) is not None), None)


def _column(function: Callable[..., float], whole: list[bool], *columns: Sequence[Any]) -> Tensor:
    """A function of each prompt, NaN for prompts that are not wholly judged."""
    given = zip(whole, *columns, strict=True)
    return torch.tensor([function(*row) if is_whole else torch.nan for is_whole, *row in given], dtype=torch.float64)
