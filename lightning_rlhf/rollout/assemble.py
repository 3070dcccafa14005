"""Assembly of a rollout: prompts and completions become tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError
from lightning_rlhf.types import Completion, PromptBatch, Rollout


def assemble(
    prompts: PromptBatch,
    completions: Sequence[Completion],
    temperature: float = 1.0,
    environment: EnvironmentSettings | None = None,
) -> Rollout:
    """Return the rollout of completions, whose rewards are NaN until :meth:`~.scorer.Scorer.add_rewards` sets them.

    Args:
        prompts: N prompts.
        completions: B = N x G completions, grouped by prompt.
        temperature: temperature of the sampling.
        environment: settings of the environment whose conversations the completions are; None without one.

    Raises:
        ValueError: the number of completions is 0, or not a multiple of the number of prompts.
    """
    if not completions or len(completions) % len(prompts):
        raise UsageError(
            f"got {len(completions)} completions for {len(prompts)} prompts; each needs the same number, at least 1"
        )
    samples = len(completions) // len(prompts)
    records = [completion.conversation for completion in completions]
    prompt_rows = [ids for ids in prompts.token_ids for _ in range(samples)]
    prompt_ids, prompt_lengths = pad_right(
        [ids if record is None else record.prompt_ids for ids, record in zip(prompt_rows, records, strict=True)]
    )
    response_ids, response_lengths = pad_right([completion.token_ids for completion in completions])
    real = torch.arange(response_ids.shape[1]).unsqueeze(0) < response_lengths.unsqueeze(1)
    mask = real.clone()
    mask[real] = torch.tensor([mark for each in completions for mark in each.sampled or [True] * len(each.token_ids)])
    logprobs = torch.zeros(response_ids.shape)
    logprobs[real] = torch.tensor([value for completion in completions for value in completion.logprobs])
    versions = torch.zeros_like(response_ids)
    versions[real] = torch.tensor([version for completion in completions for version in completion.token_versions])
    leaves_out_failed = environment is not None and environment.on_error == "skip"
    failed = torch.tensor([record is not None and record.fault is not None for record in records])
    numbers = prompts.positions or range(len(prompts))
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_lengths=prompt_lengths,
        response_ids=response_ids,
        response_lengths=response_lengths,
        response_mask=mask,
        rollout_logprobs=logprobs,
        rewards={},
        reward=torch.full((len(completions),), math.nan),
        group=torch.arange(len(prompts)).repeat_interleave(samples),
        truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
        policy_version=versions.masked_fill(~mask, 0),
        included=~failed if leaves_out_failed else torch.ones_like(failed),
        position=torch.tensor([number * samples + k for number in numbers for k in range(samples)]),
        temperature=temperature,
        step_rewards=_step_rewards(completions, environment, response_ids.shape[1]),
        text_starts=_text_starts(completions, environment, response_ids.shape[1]),
    )


def _step_rewards(
    completions: Sequence[Completion], environment: EnvironmentSettings | None, width: int
) -> Tensor | None:
    """Return (B, T) weighted rewards of turns before the last; None without an environment."""
    if environment is None:
        return None
    rewards = torch.zeros(len(completions), width)
    for row, completion in enumerate(completions):
        if (record := completion.conversation) is not None:
            for end, value in zip(record.turn_ends[:-1], record.turn_rewards, strict=False):
                rewards[row, end - 1] = environment.weight * value
    return rewards


def _text_starts(
    completions: Sequence[Completion], environment: EnvironmentSettings | None, width: int
) -> Tensor | None:
    """Return (B, T) bool, the starts of further branches; None without an agent."""
    if environment is None or not environment.is_agent:
        return None
    starts = torch.zeros(len(completions), width, dtype=torch.bool)
    for row, completion in enumerate(completions):
        if completion.conversation is not None:
            starts[row, completion.conversation.text_starts] = True
    return starts
