"""From prompts and completions to one typed rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.rewards.adapter import RewardFunction
from lightning_rlhf.types import Completion, PromptBatch, Rollout


def collect(
    batch: PromptBatch,
    completions: Sequence[Completion],
    rewards: Sequence[RewardFunction],
    tokenizer: PreTrainedTokenizerBase,
    temperature: float = 1.0,
) -> Rollout:
    """Judge completions and lay everything out as tensors.

    Args:
        batch: N prompts.
        completions: B = N x G of them, those of one prompt next to each other.
        rewards: what judges them.
        tokenizer: turns token ids into the text that the functions see; special tokens are left out.
        temperature: they were drawn with.

    Returns:
        The rollout; rows are in the order of the completions.

    Raises:
        ValueError: the completions do not divide among the prompts.
        RuntimeError: a reward function misbehaved.
    """
    if not completions or len(completions) % len(batch):
        raise ValueError(f"{len(completions)} completions do not divide among {len(batch)} prompts")
    size = len(completions) // len(batch)
    prompt_ids, prompt_lengths = pad_right([ids for ids in batch.token_ids for _ in range(size)])
    response_ids, response_lengths = pad_right([completion.token_ids for completion in completions])
    mask = torch.arange(response_ids.shape[1]).unsqueeze(0) < response_lengths.unsqueeze(1)
    logprobs = torch.zeros(response_ids.shape)
    logprobs[mask] = torch.tensor([value for completion in completions for value in completion.logprobs])
    given: dict[str, list[Any]] = {
        "prompts": [text for text in batch.texts for _ in range(size)],
        "completions": tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True),
        "completion_ids": [completion.token_ids for completion in completions],
        "finished": [completion.finish_reason == "stop" for completion in completions],
        **{name: [value for value in values for _ in range(size)] for name, values in batch.columns.items()},
    }
    by_name = {reward.label: reward(**given) for reward in rewards}
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        response_ids=response_ids,
        response_lengths=response_lengths,
        response_mask=mask,
        rollout_logprobs=logprobs,
        rewards=by_name,
        reward=weighted_sum([(reward.weight, by_name[reward.label]) for reward in rewards], len(completions)),
        group=torch.arange(len(batch)).repeat_interleave(size),
        truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
        policy_version=torch.tensor([completion.policy_version for completion in completions]),
        kept=torch.ones(len(completions), dtype=torch.bool),
        place=torch.tensor([place * size + k for place in batch.places or range(len(batch)) for k in range(size)]),
        temperature=temperature,
    )


def weighted_sum(terms: Sequence[tuple[float, Tensor]], rows: int) -> Tensor:
    """(B,) sum of weight times reward, leaving out rewards that are NaN because they did not apply."""
    total = torch.zeros(rows)
    for weight, values in terms:
        total += weight * values.nan_to_num(0.0)
    return total
