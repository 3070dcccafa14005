"""Metrics of a validation, over all of its batches and ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.callbacks.loop.rollout_rows import end_of, segments_of
from lightning_rlhf.data.columns import MAX_SOURCES, source_of
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.expected_errors import RunError
from lightning_rlhf.functional.data_ranks import DataRanks
from lightning_rlhf.functional.diagnostics import ordered_fraction
from lightning_rlhf.functional.samples import (
    draw_sizes,
    extremes,
    majorities,
    mean_difference,
    mean_interval,
    number_or_nan,
    passes,
)
from lightning_rlhf.modules.metrics import MeanAccumulator
from lightning_rlhf.rewards.executor import MetricSums
from lightning_rlhf.rollout.clock import means_over_ranks
from lightning_rlhf.rollout.scorer import conversation_metrics
from lightning_rlhf.types import Completion, ConversationRecord, Prompt, PromptBatch, Rollout

log = logging.getLogger(__name__)
AnswerExtractor = Callable[[list[str]], Sequence[Hashable]]  # completions to their answers
_MAX_STORED_SAMPLES = 64
_SOURCE, _INDEX = 0, 1  # first columns of Validation.table
_LEADING = 2  # number of the columns before those of the quantities


@dataclass
class _Quantity:
    """One value of each response: a reward, its correctness, or the score of the reward model.

    Args:
        prefix: prefix of the names of its metrics.
        is_correctness: whether values are 1 for correct and 0 for incorrect responses.
        may_be_missing: whether a response may have no value, which the mean of its prompt then leaves out; if False,
            NaN is an error that makes the means NaN.
        batches: (prompts, 1 + N) float64 values of each batch, the greedy response first; NaN without a value.
    """

    prefix: str
    is_correctness: bool = False
    may_be_missing: bool = True
    batches: list[Tensor] = field(default_factory=list)

    def mean_metric(self, kind: str) -> str:
        """Return the name of a mean: ``greedy`` or ``sampled`` with the prefix; that of correctness is a fraction."""
        return f"{self.prefix}{'fraction_correct_' if self.is_correctness else ''}{kind}"

    @property
    def table(self) -> Tensor:
        """(prompts, 1 + N) float64 values of this rank."""
        return torch.cat(self.batches)

    def statistics(self, answers: list[Sequence[Hashable]] | None) -> dict[str, Tensor]:
        """Return statistics for each prompt by name, NaN where a value is missing.

        Args:
            answers: answers of the samples of each prompt; None without a function that extracts them.
        """
        greedy, sampled = self.table[:, :1], self.table[:, 1:]
        mean = sampled.nanmean(dim=1) if self.may_be_missing else sampled.mean(dim=1)
        statistics = {self.mean_metric("greedy"): greedy, self.mean_metric("sampled"): mean}
        if sampled.shape[1] > 1 and not self.is_correctness:
            deviation = sampled - sampled.mean(dim=1, keepdim=True)
            statistics[f"{self.prefix}sampled_std"] = (deviation**2).mean(dim=1).sqrt()
        prompts = sampled.tolist()
        answers_of_prompts = [None] * len(prompts) if answers is None else answers
        of_k = [self._statistics_of_k(*prompt) for prompt in zip(prompts, answers_of_prompts, strict=True)]
        for name in self._names_of_k(sampled.shape[1], answers is not None):
            values = [of_prompt.get(name, math.nan) for of_prompt in of_k]
            statistics[f"{self.prefix}{name}"] = torch.tensor(values, dtype=torch.float64)
        return statistics

    def _names_of_k(self, count: int, has_answers: bool) -> list[str]:
        """Return the names of the statistics of k samples, from made-up values: a rank without prompts needs them, too.

        Args:
            count: samples of each prompt.
            has_answers: whether their answers are known.
        """
        return list(self._statistics_of_k([0.0] * count, [None] * count if has_answers else None))

    def _statistics_of_k(self, values: list[float], answers: Sequence[Hashable] | None) -> dict[str, float]:
        """Return the statistics of k samples of one prompt; none if a value is missing.

        Args:
            values: value of each sample.
            answers: answer of each sample; None if they are unknown.
        """
        if any(math.isnan(value) for value in values):
            return {}
        sizes = draw_sizes(len(values))
        if self.is_correctness:
            statistics = passes([value == 1 for value in values], sizes)
        else:
            statistics = extremes(values, sizes[1:])
        if answers is None:
            return statistics
        return statistics | majorities(answers, values, sizes[1:])


class Validation:
    """Metrics of one validation, with one greedy and N = ``val_samples`` sampled responses per prompt.

    For every reward, and the reward model's score: the mean of greedy and sampled responses, the standard deviation of
    a prompt's samples, and the reward of the best, the worst and the most frequent answer of k samples, for k = 2, 4,
    8, ... and N. For correctness, pass@k replaces best and worst: the probability that at least one of k samples is
    correct, for k = 1 too. These are exact means over all draws of k
    of the N samples, so they are unbiased and not random. A truncated response counts with its reward. A response
    without a reward (NaN) is not part of the means, and its prompt not part of the statistics that compare a prompt's
    samples. The means have 95 % intervals over prompts.

    All prompts have the same weight; the samples of a prompt are on one rank.

    Args:
        val_samples: N, at least 1.
        rewards: names of all reward functions.
        metric: name of the reward that is at least 1 for correct responses; None without one.
        answer: function that returns the answers of completions, to find the most frequent one. None uses those that
            reward functions found.
        sources: values of ``source`` or ``data_source`` in the data; each has separate metrics.
        scored: whether there are scores of a reward model.
        image_tokens: tokens that stand for the parts of an image.
    """

    def __init__(
        self,
        val_samples: int,
        rewards: Sequence[str] = (),
        metric: str | None = None,
        answer: AnswerExtractor | None = None,
        sources: Sequence[str] = (),
        scored: bool = False,
        image_tokens: Sequence[int] = (),
    ) -> None:
        self._image_tokens = image_tokens
        self._val_samples = val_samples
        self._metric = metric
        self._answer = answer
        self._sources = list(sources)
        # Every rank has all quantities, so that it reduces the same values even without any prompt.
        empty = torch.empty(0, 1 + val_samples, dtype=torch.float64)
        self._rewards = {name: _Quantity(f"{name}_", batches=[empty]) for name in rewards}
        self._correctness = None if metric is None else _Quantity("", is_correctness=True, batches=[empty])
        self._score = _Quantity("score_", may_be_missing=False, batches=[empty]) if scored else None
        self._lengths = [empty]
        self._truncated = [empty]
        self._answers: list[Sequence[Hashable]] = []
        self._source_numbers: list[int] = []  # of each prompt; -1 without a source
        self._indices: list[int] = []  # of each prompt's row in the data
        self._conversations: list[MetricSums] = []
        self.samples: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []  # the same prompts and responses with fixed names, for files
        self._last_rows: list[tuple[int, dict[str, Any]]] = []  # (position, row) of the last batch's prompts

    def add(
        self,
        batch: PromptBatch,
        rollout: Rollout,
        tokenizer: PreTrainedTokenizerBase,
        sampled: Sequence[Completion] = (),
        greedy: Sequence[Completion] = (),
    ) -> None:
        """Add a batch of B prompts.

        Args:
            batch: prompts.
            rollout: B x (1 + N) responses.
            tokenizer: tokenizer that decodes them.
            sampled: B x N sampled completions, whose conversations are counted.
            greedy: B greedy completions, for the ends of their conversations in :attr:`rows`.
        """
        conversations = [completion for completion in sampled if completion.conversation is not None]
        if conversations:
            self._conversations.append(conversation_metrics(conversations))
        for name, values in rollout.rewards.items():
            self._rewards[name].batches.append(self._by_prompt(values))
        self._lengths.append(self._by_prompt(rollout.sampled_lengths))
        self._truncated.append(self._by_prompt(rollout.truncated))
        if self._correctness is not None:
            reward = rollout.rewards[str(self._metric)]
            correct = (reward >= 1).double().masked_fill(reward.isnan(), torch.nan)
            self._correctness.batches.append(self._by_prompt(correct))
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(self._sources)}
        self._indices += [prompt.index for prompt in batch]
        self._source_numbers += [numbers.get(source_of(prompt.columns), -1) for prompt in batch]
        lengths = rollout.response_lengths.tolist()
        ids = [row[:length] for row, length in zip(rollout.response_ids, lengths, strict=True)]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        size = 1 + self._val_samples
        self._last_rows = []
        for i, prompt in enumerate(batch):
            first = i * size
            if self._answer is not None:
                self._answers.append(self._answers_of(texts[first + 1 : first + size]))
            if len(self.samples) < _MAX_STORED_SAMPLES:
                text = str(tokenizer.decode(prompt.token_ids, skip_special_tokens=True))
                texts_of = {"prompt": text, "response": texts[first]}
                record = greedy[i].conversation if greedy else None
                self._store(prompt, texts_of, rollout, first, tokenizer=tokenizer, record=record)
                self._last_rows.append((i, self.rows[-1]))

    def _store(
        self,
        prompt: Prompt,
        texts: dict[str, str],
        rollout: Rollout,
        position: int,
        tokenizer: PreTrainedTokenizerBase,
        record: ConversationRecord | None,
    ) -> None:
        """Store a prompt with its greedy response.

        Args:
            prompt: the prompt.
            texts: texts of prompt and response.
            rollout: rollout with the response.
            position: position of the response in it.
            tokenizer: tokenizer that decodes the parts of a conversation.
            record: record of the response's conversation; None for an ordinary one.
        """
        rewards = {name: values[position].item() for name, values in rollout.rewards.items()}
        columns = dict(prompt.columns)
        if record is not None and record.images:
            columns = {**columns, "images": [*(columns.get("images") or ()), *record.images]}
        self.samples.append({**columns, **texts, **rewards})  # these names replace columns
        self.rows.append(
            {
                "index": prompt.index,
                **texts,
                **segments_of(tokenizer, rollout, position, self._image_tokens),
                **({"ground_truth": columns["ground_truth"]} if "ground_truth" in columns else {}),
                **self._rewards_of(rewards),
                "response_tokens": int(rollout.response_lengths[position]),
                **end_of(bool(rollout.truncated[position]), record),
            }
        )

    def _rewards_of(self, rewards: dict[str, float]) -> dict[str, Any]:
        """Return the fields of a row about its rewards; ``reward`` is that of ``metric``, else the first one."""
        named = {"reward_name": self._metric} if self._metric in rewards else {}
        return {
            "reward": rewards.get(str(self._metric), next(iter(rewards.values()), None)),
            **named,
            "rewards": rewards,
        }

    def add_answers(self, answers: Mapping[str, Sequence[Hashable]]) -> None:
        """Add the answers that reward functions found in a batch, for majority votes without a function ``answer``.

        Those of the reward ``metric`` count, or, if it found none, those of the first that did.

        Args:
            answers: answers of B x (1 + N) responses by name of the reward; None does not vote.
        """
        if self._answer is None and answers:
            names = sorted(answers, key=lambda name: (set(answers[name]) == {None}, name != self._metric))
            chosen, size = answers[names[0]], 1 + self._val_samples
            self._answers += [chosen[first + 1 : first + size] for first in range(0, len(chosen), size)]

    def add_scores(self, scores: Tensor) -> None:
        """Add the reward model's scores of the responses that were added last."""
        assert self._score is not None
        table = self._by_prompt(scores)
        self._score.batches.append(table)
        for i, row in self._last_rows:
            score = table[i, 0].item()
            row["rewards"]["score"] = score
            if not self._rewards:
                row["reward"] = score

    @property
    def _quantities(self) -> list[_Quantity]:
        """All quantities, in the order of the columns of :meth:`table`."""
        ordered = [self._correctness, *self._rewards.values(), self._score]
        return [quantity for quantity in ordered if quantity is not None]

    @property
    def columns(self) -> list[str]:
        """Names of the columns of :meth:`table`."""
        kinds = ["greedy", *(f"sampled {number}" for number in range(self._val_samples))]
        named = [quantity.mean_metric(kind) for quantity in self._quantities for kind in kinds]
        return ["source", "index", *named]

    def table(self, ranks: DataRanks) -> Tensor:
        """Return the values of all prompts of all ranks. All ranks.

        Args:
            ranks: ranks with different prompts.

        Returns:
            (prompts, 2 + Q (1 + N)) float64: number of the source, index of the prompt's row in the data, and the
            values of each of Q quantities, the greedy response first; NaN without a value.
        """
        numbers = torch.tensor([self._source_numbers, self._indices], dtype=torch.float64).T
        return ranks.gather(torch.cat([numbers, *(quantity.table for quantity in self._quantities)], dim=1))

    def _changes(self, first: Tensor, last: Tensor) -> dict[str, float]:
        """Return the mean changes of greedy and sampled responses to the prompts that two validations have in common.

        They are over all these prompts, and over those of each source with at least two; none if there are fewer than
        two in all.

        Args:
            first: :meth:`table` of the first validation, with the same columns.
            last: :meth:`table` of this one.
        """
        earlier = {int(row[_INDEX]): row for row in first.tolist()}
        common = [(earlier[int(row[_INDEX])], row) for row in last.tolist() if int(row[_INDEX]) in earlier]
        if len(common) < 2:
            return {}
        metrics = dict[str, float]()
        for group, members in self._groups(torch.tensor([row[_SOURCE] for _, row in common])).items():
            if members.sum() > 1:
                chosen = [pair for pair, is_member in zip(common, members.tolist(), strict=True) if is_member]
                metrics |= {f"{group}{name}": value for name, value in self._changes_of(chosen).items()}
        return metrics

    def _changes_of(self, pairs: list[tuple[list[float], list[float]]]) -> dict[str, float]:
        """Return the mean changes of greedy and sampled responses to some prompts, without a prefix.

        Args:
            pairs: rows of each prompt in the tables of two validations.
        """
        metrics = dict[str, float]()
        for name, columns in self._means():
            earlier = [_known(row[columns]) for row, _ in pairs]
            later = [_known(row[columns]) for _, row in pairs]
            change = mean_difference(earlier, later)
            for bound, value in change.items():
                ending = "_change" if bound == "mean" else f"_change_{bound}"
                metrics[f"{name}{ending}"] = number_or_nan(value)
        return metrics

    def _means(self) -> Iterator[tuple[str, slice]]:
        """Yield the name of each mean of greedy or sampled responses, and the columns of its values in the table."""
        size = 1 + self._val_samples
        for number, quantity in enumerate(self._quantities):
            start = _LEADING + number * size
            yield quantity.mean_metric("greedy"), slice(start, start + 1)
            yield quantity.mean_metric("sampled"), slice(start + 1, start + size)

    def metrics(self, ranks: DataRanks, first: Tensor | None = None) -> dict[str, float]:
        """Return all metrics over all ranks, those of a source under ``val/<source>/``. All ranks.

        Args:
            ranks: ranks with different prompts.
            first: :meth:`table` of the first validation of the run, with which this one is compared; None for none.
        """
        votes = self._answer is not None or any(each is not None for row in self._answers for each in row)
        answers = self._answers if ranks.max(torch.tensor(float(votes))) else None  # the same names on all ranks
        statistics = {"response_tokens_mean": torch.cat(self._lengths)[:, 1:]}
        statistics["truncated_fraction"] = torch.cat(self._truncated)[:, 1:]
        if self._correctness is not None:
            statistics |= self._correctness.statistics(answers)
        for reward in self._rewards.values():
            statistics |= reward.statistics(answers)
        scores = {} if self._score is None else self._score.statistics(answers)
        sources = torch.tensor(self._source_numbers, dtype=torch.long)
        means = MeanAccumulator()
        for prefix, members in self._groups(sources).items():
            for name, values in statistics.items():
                applies = ~values[members].isnan()
                means.add(f"{prefix}{name}", values[members], applies)
            for name, values in scores.items():
                means.add(f"{prefix}{name}", values[members])  # a NaN score is an error and must be visible
        metrics = means.means(ranks)
        of_conversations = means_over_ranks(self._conversations)
        metrics |= {f"val/{name}": value for name, value in of_conversations.items() if name.startswith("env/")}
        table = self.table(ranks)
        metrics |= self._intervals(table)
        if first is not None:
            metrics |= self._changes(first, table)
        if self._correctness is not None and self._score is not None:
            metrics |= self._score_order(self._score.table[:, 1:], self._correctness.table[:, 1:], sources, ranks)
        return metrics

    def _groups(self, sources: Tensor) -> dict[str, Tensor]:
        """Return which prompts belong to each prefix of names: all, and those of each source."""
        groups = {"val/": torch.ones_like(sources, dtype=torch.bool)}
        return groups | {f"val/{name}/": sources == number for number, name in enumerate(self._sources)}

    def _intervals(self, table: Tensor) -> dict[str, float]:
        """Return the bounds of the 95 % intervals of the means of greedy and sampled responses; NaN without one."""
        metrics = dict[str, float]()
        for group, members in self._groups(table[:, _SOURCE]).items():
            for name, columns in self._means():
                known = [_known(row) for row in table[members, columns].tolist()]
                interval = {}
                if any(known):
                    interval = mean_interval([row for row in known if row])
                for bound in ("low", "high"):
                    metrics[f"{group}{name}_{bound}"] = number_or_nan(interval.get(bound))
        return metrics

    def _score_order(self, score: Tensor, correct: Tensor, sources: Tensor, ranks: DataRanks) -> dict[str, float]:
        """Return the fraction of (correct, incorrect) pairs of samples that the reward model's score orders correctly.

        It is NaN where all samples are correct or all are incorrect.
        """
        source = sources.unsqueeze(1).double().expand_as(score)
        table = ranks.gather(torch.stack([score.flatten(), correct.flatten(), source.flatten()], dim=1))
        all_scores, all_correct, all_sources = table.unbind(dim=1)
        metrics = {}
        for prefix, rows in self._groups(all_sources).items():
            right = all_scores[rows & (all_correct == 1)]
            wrong = all_scores[rows & (all_correct == 0)]
            metrics[f"{prefix}score_orders_correct_first"] = ordered_fraction(right, wrong)
        return metrics

    def _answers_of(self, completions: list[str]) -> Sequence[Hashable]:
        assert self._answer is not None
        answers = list(self._answer(completions))
        if len(answers) != len(completions) or not all(isinstance(answer, Hashable) for answer in answers):
            raise RunError(
                f"val_answer returned {answers!r} for {len(completions)} completions, expected a text or a number for "
                f"each, or None for a completion without an answer"
            )
        return answers

    def _by_prompt(self, values: Tensor) -> Tensor:
        """Return (responses,) values as (prompts, 1 + N)."""
        return values.detach().cpu().double().view(-1, 1 + self._val_samples)


def _known(values: Sequence[float]) -> list[float]:
    """Return the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def sources_in(data: PromptDataModule) -> list[str]:
    """Return the sources of the validation data that have separate metrics; none if there are fewer than two.

    They are the values of the column ``source``, or of verl's ``data_source``. More than 32 different values are not
    treated as sources.

    Args:
        data: data module, all of whose validation rows are read, so that every rank returns the same.
    """
    sources = {source_of(example.columns) for example in data.examples.get("val", [])} - {None}
    if len(sources) > MAX_SOURCES:
        log.info("the validation data has %d sources, too many for separate metrics", len(sources))
        return []
    return sorted(str(name) for name in sources) if len(sources) > 1 else []


def averages_weights(trainer: Trainer) -> bool:
    """Return whether a callback validates with averaged weights instead of the actor's."""
    return any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)
