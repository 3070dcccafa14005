"""Assembly of a rollout from prompts, completions and rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.rewards.executor import Calls, RewardExecutor, RolloutRewards
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.types import Completion, PromptBatch, Rollout


class Collector:
    """Assembly of one rollout: scores completions as they finish, and converts everything to tensors at the end.

    Args:
        batch: N prompts.
        executor: executor of the reward functions.
        tokenizer: tokenizer that decodes responses for the functions; special tokens are left out.
        size: G, responses per prompt.
        state: progress of the run, for functions that use ``trainer_state``.
    """

    def __init__(
        self,
        batch: PromptBatch,
        executor: RewardExecutor,
        tokenizer: PreTrainedTokenizerBase,
        size: int = 1,
        state: TrainerState | None = None,
    ) -> None:
        self._batch = batch
        self._executor = executor
        self._tokenizer = tokenizer
        self._size = size
        self._state = state
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
        prompt_ids, prompt_lengths = pad_right([ids for ids in batch.token_ids for _ in range(size)])
        response_ids, response_lengths = pad_right([completion.token_ids for completion in completions])
        mask = torch.arange(response_ids.shape[1]).unsqueeze(0) < response_lengths.unsqueeze(1)
        logprobs = torch.zeros(response_ids.shape)
        logprobs[mask] = torch.tensor([value for completion in completions for value in completion.logprobs])
        versions = torch.zeros_like(response_ids)
        versions[mask] = torch.tensor([version for completion in completions for version in completion.token_versions])
        columns = self._columns(range(len(completions)), completions)
        finish = self._executor.begin(columns, self._state, self._started)
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
            policy_version=versions,
            included=torch.ones(len(completions), dtype=torch.bool),
            position=torch.tensor([prompt * size + k for prompt in prompts for k in range(size)]),
            temperature=temperature,
        )
        return rollout, finish

    def _columns(self, indices: Sequence[int], completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """Return the values that reward functions can have as arguments, for the completions with these indices."""
        batch = self._batch
        prompts = [index // self._size for index in indices]
        ids = [completion.token_ids for completion in completions]
        return {
            "prompts": [batch.texts[i] for i in prompts],
            "completions": self._tokenizer.batch_decode(ids, skip_special_tokens=True),
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


def weighted_sum(terms: Sequence[tuple[float, Tensor]], rows: int) -> Tensor:
    """Return the (B,) sum of weight times reward; NaN, for a reward that did not apply, counts as 0."""
    total = torch.zeros(rows)
    for weight, values in terms:
        total += weight * values.nan_to_num(0.0)
    return total
