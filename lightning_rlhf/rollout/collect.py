"""From prompts and completions to one typed rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.rewards.executor import Calls, RewardExecutor, RolloutRewards
from lightning_rlhf.rewards.function import RewardFunction, TrainerState
from lightning_rlhf.types import Completion, PromptBatch, Rollout


class Collector:
    """One rollout in the making: has completions judged as they come, and lays everything out at the end.

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

    def take(self, place: int, completion: Completion) -> None:
        """A completion that is finished while others are not.

        Args:
            place: in the rollout.
            completion: at that place.
        """
        if self._executor.has_streaming:
            self._started |= self._executor.start(place, self._offered([place], [completion]), self._state)

    def dry_run(self) -> None:
        """Try the reward functions on the prompts themselves as if they were responses, and on empty ones.

        Raises:
            ValueError: one does not work.
        """
        end = [self._tokenizer.eos_token_id]
        texts = [ids if row % 2 == 0 and ids else end for row, ids in enumerate(self._batch.token_ids * self._size)]
        made_up = [Completion(list(ids), [0.0] * len(ids), "stop", 0) for ids in texts]
        self._executor.dry_run(self._offered(range(len(made_up)), made_up))

    def rollout(self, completions: Sequence[Completion], temperature: float) -> tuple[Rollout, RolloutRewards]:
        """The rollout, and what the reward functions said of it.

        Args:
            completions: B = N x G of them, those of one prompt next to each other.
            temperature: they were drawn with.

        Raises:
            ValueError: the completions do not divide among the prompts.
            RuntimeError: a reward function misbehaved.
        """
        batch, size = self._batch, self._size
        if not completions or len(completions) != len(batch) * size:
            raise ValueError(f"{len(completions)} completions do not divide among {len(batch)} prompts")
        prompt_ids, prompt_lengths = pad_right([ids for ids in batch.token_ids for _ in range(size)])
        response_ids, response_lengths = pad_right([completion.token_ids for completion in completions])
        mask = torch.arange(response_ids.shape[1]).unsqueeze(0) < response_lengths.unsqueeze(1)
        logprobs = torch.zeros(response_ids.shape)
        logprobs[mask] = torch.tensor([value for completion in completions for value in completion.logprobs])
        columns = self._offered(range(len(completions)), completions)
        scored = self._executor.score(columns, self._state, self._started)
        terms = [(reward.weight, scored.rewards[reward.label]) for reward in self._executor.functions]
        rollout = Rollout(
            prompt_ids=prompt_ids,
            prompt_lengths=prompt_lengths,
            response_ids=response_ids,
            response_lengths=response_lengths,
            response_mask=mask,
            rollout_logprobs=logprobs,
            rewards=scored.rewards,
            reward=weighted_sum(terms, len(completions)),
            group=torch.arange(len(batch)).repeat_interleave(size),
            truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
            policy_version=torch.tensor([completion.policy_version for completion in completions]),
            kept=torch.ones(len(completions), dtype=torch.bool),
            place=torch.tensor([place * size + k for place in batch.places or range(len(batch)) for k in range(size)]),
            temperature=temperature,
        )
        return rollout, scored

    def _offered(self, places: Sequence[int], completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """What reward functions may ask for, of the completions at these places."""
        batch = self._batch
        prompts = [place // self._size for place in places]
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
    """Judge completions that are all there, and lay everything out as tensors; see :class:`Collector`.

    Args:
        batch: N prompts.
        completions: B = N x G of them, those of one prompt next to each other.
        rewards: what judges them.
        tokenizer: turns token ids into the text that the functions see.
        temperature: they were drawn with.

    Returns:
        The rollout; rows are in the order of the completions.

    Raises:
        ValueError: the completions do not divide among the prompts.
        RuntimeError: a reward function misbehaved.
    """
    with RewardExecutor(rewards) as executor:
        collector = Collector(batch, executor, tokenizer, len(completions) // len(batch))
        return collector.rollout(completions, temperature)[0]


def weighted_sum(terms: Sequence[tuple[float, Tensor]], rows: int) -> Tensor:
    """(B,) sum of weight times reward, leaving out rewards that are NaN because they did not apply."""
    total = torch.zeros(rows)
    for weight, values in terms:
        total += weight * values.nan_to_num(0.0)
    return total
