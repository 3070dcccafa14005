"""Assembly of a rollout from prompts, completions and rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.environments.conversation import StopReason, last_turn_start
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.environments.worker import FaultKind
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.executor import Calls, MetricSums, RewardExecutor, RolloutRewards
from lightning_rlhf.rewards.function import ENVIRONMENT, RewardFunction, TrainerState
from lightning_rlhf.types import Completion, PromptBatch, Rollout


class Collector:
    """Assembly of one rollout: scores completions as they finish, and converts everything to tensors at the end.

    Args:
        batch: N prompts.
        executor: executor of the reward functions.
        tokenizer: tokenizer that decodes responses for the functions; special tokens are left out.
        size: G, responses per prompt.
        state: progress of the run, for functions that use ``trainer_state``.
        environment: settings of the environment whose conversations the completions are; None without one.
    """

    def __init__(
        self,
        batch: PromptBatch,
        executor: RewardExecutor,
        tokenizer: PreTrainedTokenizerBase,
        size: int = 1,
        state: TrainerState | None = None,
        environment: EnvironmentSettings | None = None,
    ) -> None:
        self._batch = batch
        self._executor = executor
        self._tokenizer = tokenizer
        self._size = size
        self._state = state
        self._environment = environment
        self._started: Calls = {}

    def add(self, index: int, completion: Completion) -> None:
        """Start scoring a completion before others are finished, if a reward function supports that.

        Args:
            index: index of the completion in the rollout.
            completion: finished completion.
        """
        if self._executor.has_streaming:
            self._started |= self._executor.start(index, self._columns([index], [completion]), self._state)

    def dry_run(self) -> None:
        """Call the reward functions with the prompts in place of responses, and with empty responses.

        Raises:
            ValueError: a function fails.
        """
        end = [self._tokenizer.eos_token_id]
        responses = [ids if row % 2 == 0 and ids else end for row, ids in enumerate(self._batch.token_ids * self._size)]
        completions = [Completion(list(ids), [0.0] * len(ids), "stop", 0) for ids in responses]
        self._executor.dry_run(self._columns(range(len(completions)), completions))

    def rollout(self, completions: Sequence[Completion], temperature: float) -> tuple[Rollout, RolloutRewards]:
        """Return the rollout and the results of the reward functions.

        Args:
            completions: B = N x G completions, grouped by prompt.
            temperature: temperature of the sampling.

        Raises:
            ValueError: the number of completions is not N x G.
            RuntimeError: a reward function failed.
        """
        rollout, finish = self.begin(completions, temperature)
        scored = finish()
        return self.with_rewards(rollout, scored), scored

    def with_rewards(self, rollout: Rollout, scored: RolloutRewards) -> Rollout:
        """Return a rollout with the results of the reward functions and their weighted sum, on its device."""
        terms = [(reward.weight, scored.rewards[reward.label]) for reward in self._executor.functions]
        if self._environment is not None:
            terms.append((self._environment.weight, scored.rewards[ENVIRONMENT]))
        device = rollout.reward.device
        rewards = {name: values.to(device) for name, values in scored.rewards.items()}
        return replace(rollout, rewards=rewards, reward=weighted_sum(terms, len(rollout)).to(device))

    def begin(
        self, completions: Sequence[Completion], temperature: float
    ) -> tuple[Rollout, Callable[[], RolloutRewards]]:
        """Start the reward functions; arguments and errors are those of :meth:`rollout`.

        Returns:
            The rollout with rewards of NaN, and a function that waits for the results of the reward functions.
        """
        batch = self._batch
        size = self._size
        if not completions or len(completions) != len(batch) * size:
            raise UsageError(
                f"got {len(completions)} completions for {len(batch)} prompts; each needs the same number, at least 1"
            )
        prompts = batch.positions or range(len(batch))
        records = [completion.conversation for completion in completions]
        prompt_rows = [ids for ids in batch.token_ids for _ in range(size)]
        prompt_ids, prompt_lengths = pad_right(
            [ids if own is None else own.prompt_ids for ids, own in zip(prompt_rows, records, strict=True)]
        )
        response_ids, response_lengths = pad_right([completion.token_ids for completion in completions])
        real = torch.arange(response_ids.shape[1]).unsqueeze(0) < response_lengths.unsqueeze(1)
        mask = real.clone()
        mask[real] = torch.tensor(
            [mark for each in completions for mark in each.sampled or [True] * len(each.token_ids)]
        )
        logprobs = torch.zeros(response_ids.shape)
        logprobs[real] = torch.tensor([value for completion in completions for value in completion.logprobs])
        versions = torch.zeros_like(response_ids)
        versions[real] = torch.tensor([version for completion in completions for version in completion.token_versions])
        columns = self._columns(range(len(completions)), completions)
        finish = self._executor.begin(columns, self._state, self._started)
        if self._environment is not None:
            finish = partial(with_environment, finish, completions, self._environment.on_error == "zero")
        skips = self._environment is not None and self._environment.on_error == "skip"
        rollout = Rollout(
            prompt_ids=prompt_ids,
            prompt_lengths=prompt_lengths,
            response_ids=response_ids,
            response_lengths=response_lengths,
            response_mask=mask,
            rollout_logprobs=logprobs,
            rewards={},
            reward=torch.full((len(completions),), math.nan),
            group=torch.arange(len(batch)).repeat_interleave(size),
            truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
            policy_version=versions.masked_fill(~mask, 0),
            included=torch.tensor([not (skips and own is not None and own.fault is not None) for own in records]),
            position=torch.tensor([prompt * size + k for prompt in prompts for k in range(size)]),
            temperature=temperature,
            step_rewards=self._step_rewards(completions, response_ids.shape[1]),
            text_starts=self._text_starts(completions, response_ids.shape[1]),
        )
        return rollout, finish

    def _step_rewards(self, completions: Sequence[Completion], width: int) -> Tensor | None:
        """Return (B, T) weighted rewards of turns before the last; None without an environment."""
        if self._environment is None:
            return None
        rewards = torch.zeros(len(completions), width)
        for row, completion in enumerate(completions):
            if (record := completion.conversation) is not None:
                for end, value in zip(record.turn_ends[:-1], record.turn_rewards, strict=False):
                    rewards[row, end - 1] = self._environment.weight * value
        return rewards

    def _text_starts(self, completions: Sequence[Completion], width: int) -> Tensor | None:
        """Return (B, T) bool, the starts of further branches; None without an agent."""
        if self._environment is None or not self._environment.is_agent:
            return None
        starts = torch.zeros(len(completions), width, dtype=torch.bool)
        for row, completion in enumerate(completions):
            if completion.conversation is not None:
                starts[row, completion.conversation.text_starts] = True
        return starts

    def _columns(self, indices: Sequence[int], completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """Return the values that reward functions can have as arguments, for the completions with these indices."""
        batch = self._batch
        prompts = [index // self._size for index in indices]
        ids = [sampled_tokens(completion) for completion in completions]
        texts = self._tokenizer.batch_decode([last_turn(each) for each in completions], skip_special_tokens=True)
        conversations: dict[str, list[Any]] = {}
        if self._environment is not None:
            pairs = [(each.conversation, text) for each, text in zip(completions, texts, strict=True)]
            conversations = {  # a dry run has no records
                "conversations": [own.messages if own else [{"role": "assistant", "content": t}] for own, t in pairs],
                "turns": [len(own.turn_ends) if own else 1 for own, _ in pairs],
                "environment_rewards": [sum(own.turn_rewards) if own else 0.0 for own, _ in pairs],
                "stop_reasons": [own.stop if own else "done" for own, _ in pairs],
            }
        return {
            **conversations,
            "prompts": [batch.texts[i] for i in prompts],
            "completions": texts,
            "completion_ids": ids,
            "finished": [completion.finish_reason == "stop" for completion in completions],
            **{name: [values[i] for i in prompts] for name, values in batch.columns.items()},
            "messages": [batch.messages[i] for i in prompts] if batch.messages else [],
        }


def collect(
    batch: PromptBatch,
    completions: Sequence[Completion],
    rewards: Sequence[RewardFunction],
    tokenizer: PreTrainedTokenizerBase,
    temperature: float = 1.0,
) -> Rollout:
    """Score completions and return the rollout; see :class:`Collector`.

    Args:
        batch: N prompts.
        completions: B = N x G completions, grouped by prompt.
        rewards: reward functions.
        tokenizer: tokenizer that decodes responses for the functions.
        temperature: temperature of the sampling.

    Returns:
        The rollout; rows are in the order of the completions.

    Raises:
        ValueError: the number of completions is not a multiple of the number of prompts.
        RuntimeError: a reward function failed.
    """
    with RewardExecutor(rewards) as executor:
        collector = Collector(batch, executor, tokenizer, len(completions) // len(batch))
        return collector.rollout(completions, temperature)[0]


def sampled_tokens(completion: Completion) -> list[int]:
    """Return the tokens of a completion that the policy sampled."""
    if completion.sampled is None:
        return completion.token_ids
    return [token for token, sampled in zip(completion.token_ids, completion.sampled, strict=True) if sampled]


def last_turn(completion: Completion) -> list[int]:
    """Return the tokens of a completion, or those of the last turn of a conversation."""
    if completion.conversation is None:
        return completion.token_ids
    return completion.token_ids[last_turn_start(completion.conversation.turn_ends, completion.sampled or ()) :]


def with_environment(
    finish: Callable[[], RolloutRewards], completions: Sequence[Completion], zero_failed: bool = False
) -> RolloutRewards:
    """Add the rewards of the environment, and metrics of the conversations, to those of the reward functions.

    Args:
        finish: function that waits for the reward functions.
        completions: conversations.
        zero_failed: whether all rewards of conversations whose environment failed become 0.
    """
    scored = finish()
    records = [each.conversation for each in completions if each.conversation is not None]
    rewards = {**scored.rewards, ENVIRONMENT: torch.tensor([sum(own.turn_rewards) for own in records])}
    if zero_failed:
        failed = torch.tensor([own.fault is not None for own in records])
        rewards = {name: values.masked_fill(failed, 0.0) for name, values in rewards.items()}
    return RolloutRewards(rewards, scored.metrics | conversation_metrics(completions))


def conversation_metrics(completions: Sequence[Completion]) -> MetricSums:
    """Return the metrics of conversations: for each the sum and the number of its terms."""
    records = [each.conversation for each in completions if each.conversation is not None]
    count = float(len(records))
    tokens = float(sum(len(each.token_ids) for each in completions))
    written = sum((each.sampled or ()).count(False) for each in completions)
    totals: dict[str, float] = {
        "turns": sum(len(own.turn_ends) for own in records),
        "tool_calls": sum(own.tool_calls for own in records),
        "malformed_calls": sum(own.malformed for own in records),
    }
    totals |= {f"stop_{reason}": sum(own.stop == reason for own in records) for reason in get_args(StopReason)}
    totals |= {f"fault_{kind}": sum(own.fault == kind for own in records) for kind in get_args(FaultKind)}
    for name in sorted({name for own in records for name in own.metrics} - totals.keys()):
        totals[name] = sum(own.metrics.get(name, 0.0) for own in records)
    sums = {f"env/{name}": (float(total), count) for name, total in totals.items()}
    seconds = sum(own.environment_s for own in records)
    return {**sums, "env/written_share": (float(written), tokens), "time/environment_s": (seconds, count)}


def weighted_sum(terms: Sequence[tuple[float, Tensor]], rows: int) -> Tensor:
    """Return the (B,) sum of weight times reward; NaN, for a reward that did not apply, counts as 0."""
    total = torch.zeros(rows)
    for weight, values in terms:
        total += weight * values.nan_to_num(0.0)
    return total
