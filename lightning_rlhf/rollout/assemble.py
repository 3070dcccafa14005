"""Assembly of a rollout from prompts and completions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.batching.sequences import pad_right
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import UsageError, counted
from lightning_rlhf.rewards.executor import RewardExecutor
from lightning_rlhf.rewards.function import RewardFunction
from lightning_rlhf.rollout.scorer import Scorer
from lightning_rlhf.types import (
    NO_LIMITS,
    AllowedTokens,
    Completion,
    ConversationRecord,
    ConversationTokens,
    Prompt,
    PromptBatch,
    Rollout,
    RolloutImages,
    RoutedExperts,
    SamplingLimits,
)


def assemble(
    prompts: PromptBatch,
    completions: Sequence[Completion],
    temperature: float = 1.0,
    environment: EnvironmentSettings | None = None,
    limits: SamplingLimits = NO_LIMITS,
) -> Rollout:
    """Return the rollout of completions, whose rewards are NaN until :meth:`.Scorer.add_rewards` sets them.

    Args:
        prompts: N prompts.
        completions: B = N x G completions, grouped by prompt.
        temperature: temperature of the sampling.
        environment: settings of the environment whose conversations the completions are; None without one.
        limits: limits of the sampling.

    Raises:
        ValueError: the number of completions is 0, or not a multiple of the number of prompts.
    """
    if not completions or len(completions) % len(prompts):
        raise UsageError(
            f"got {len(completions)} completions for {len(prompts)} prompts; each needs the same number, at least 1"
        )
    samples = len(completions) // len(prompts)
    records = [completion.conversation for completion in completions]
    rows = [prompt for prompt in prompts for _ in range(samples)]
    begun = [row.token_ids if record is None else record.prompt_ids for row, record in zip(rows, records, strict=True)]
    prompt_ids, prompt_lengths = pad_right(begun)
    response_ids, response_lengths = pad_right([completion.token_ids for completion in completions])
    real = torch.arange(response_ids.shape[1]).unsqueeze(0) < response_lengths.unsqueeze(1)
    mask = real.clone()
    mask[real] = torch.tensor([is_sampled for completion in completions for is_sampled in _sampled(completion)])
    logprobs = torch.zeros(response_ids.shape)
    logprobs[real] = torch.tensor([value for completion in completions for value in completion.logprobs])
    versions = torch.zeros_like(response_ids)
    versions[real] = torch.tensor([version for completion in completions for version in completion.token_versions])
    leaves_out_failed = environment is not None and environment.on_error == "skip"
    failed = torch.tensor([record is not None and record.fault is not None for record in records])
    sources = [row.source for row in rows if row.source is not None]
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
        position=torch.tensor([prompt.position * samples + k for prompt in prompts for k in range(samples)]),
        temperature=temperature,
        limits=limits,
        allowed=_allowed(completions, real) if limits else None,
        experts=_experts(completions, begun, samples),
        source=torch.tensor(sources) if sources else None,
        conversation=_conversation(completions, environment, response_ids.shape[1]),
        images=_images(rows, records),
    )


def _allowed(completions: Sequence[Completion], real: Tensor) -> AllowedTokens | None:
    """Return the allowed tokens of all responses; None if the engine has not returned those of one of them."""
    parts = [completion.allowed for completion in completions if completion.allowed is not None]
    if len(parts) < len(completions):
        return None
    flat = AllowedTokens.join(parts)
    return flat.map(lambda values: values.new_zeros(real.shape).masked_scatter(real, values))


def _experts(completions: Sequence[Completion], prompts: Sequence[Sequence[int]], samples: int) -> RoutedExperts | None:
    """Return the experts of all rows; prompts have those of their first response, as a pass may read them only once."""
    experts = [completion.experts for completion in completions]
    for number, (row, prompt) in enumerate(zip(experts, prompts, strict=True)):
        of_first = experts[number - number % samples]
        if row is not None and of_first is not None and prompts[number - number % samples] == prompt:
            experts[number] = torch.cat([of_first[: len(prompt)], row[len(prompt) :]])
    return RoutedExperts.of(experts)


def _images(rows: Sequence[Prompt], records: Sequence[ConversationRecord | None]) -> RolloutImages | None:
    """Return the images of each row; None without images."""
    of_prompts = [row.images for row in rows if row.images is not None]
    most = max(0 if record is None else len(record.images) for record in records)
    if not of_prompts and not most:
        return None
    if not of_prompts or most > min(images.numbers.count(-1) for images in of_prompts):
        raise UsageError(
            f"a conversation of the checkpoint has {counted(most, 'image')}, more than max_images of the environment "
            f"allows: resume with the max_images with which it was generated"
        )
    numbers = torch.tensor([images.numbers for images in of_prompts], dtype=torch.int64)
    in_prompt = (numbers >= 0).sum(dim=1).tolist()
    written = dict[int, EncodedImage]()
    for row, record in enumerate(records):
        if record is not None:
            of_record = [image.number for image in record.images]
            numbers[row, in_prompt[row] : in_prompt[row] + len(of_record)] = torch.tensor(of_record, dtype=torch.int64)
            in_prompt[row] += record.images_in_prompt
            written |= {image.number: image for image in record.images}
    return RolloutImages(numbers, torch.tensor(in_prompt), written)


def _sampled(completion: Completion) -> Sequence[bool]:
    """Return whether the policy sampled each token."""
    return completion.sampled or [True] * len(completion.token_ids)


def _conversation(
    completions: Sequence[Completion], environment: EnvironmentSettings | None, width: int
) -> ConversationTokens | None:
    """Return the weighted rewards of turns before the last, and the starts of an agent's further branches."""
    if environment is None:
        return None
    rewards = torch.zeros(len(completions), width)
    starts = torch.zeros(len(completions), width, dtype=torch.bool)
    for row, completion in enumerate(completions):
        if (record := completion.conversation) is not None:
            starts[row, record.text_starts] = True
            for end, value in zip(record.turn_ends[:-1], record.turn_rewards, strict=False):
                rewards[row, end - 1] = environment.weight * value
    return ConversationTokens(rewards, starts if environment.is_agent else None)


def scored_rollout(
    prompts: PromptBatch,
    completions: Sequence[Completion],
    rewards: Sequence[RewardFunction],
    tokenizer: PreTrainedTokenizerBase,
    temperature: float = 1.0,
) -> Rollout:
    """Score completions and return the rollout.

    Args:
        prompts: N prompts.
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
    rollout = assemble(prompts, completions, temperature)
    with RewardExecutor(rewards) as executor:
        scorer = Scorer(prompts, executor, tokenizer, len(completions) // len(prompts))
        return scorer.add_rewards(rollout, scorer.score(completions))
