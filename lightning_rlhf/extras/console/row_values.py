"""Values of responses and their tokens as lines of files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from lightning_rlhf.data.messages import common_prefix
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.types import Experience, Prompt, PromptBatch, Rollout

_FEWEST_TOKENS = 16  # first tokens of a response with values


def value_counts(lengths: Sequence[int], rewards: Sequence[float], most: int) -> list[int]:
    """Return for each response the number of its first tokens whose values are written.

    The responses with values have them up to the same token, at least the 16th. If there are too many responses, the
    best and the worst have values, at least two responses.

    Args:
        lengths: tokens of each response.
        rewards: reward of each response; NaN without one.
        most: largest number of tokens of all responses together.
    """
    ranked = sorted((i for i in range(len(lengths)) if not math.isnan(rewards[i])), key=lambda i: -rewards[i])
    order = [ranked[-1 - i // 2] if i % 2 else ranked[i // 2] for i in range(len(ranked))]  # best, worst, second ...
    order += [i for i in range(len(lengths)) if math.isnan(rewards[i])]
    needed = list(accumulate(min(lengths[i], _FEWEST_TOKENS) for i in order))
    chosen = order[: max(sum(total <= most for total in needed), min(2, most))]
    limit = _common_limit([lengths[i] for i in chosen], most)
    counts = dict.fromkeys(range(len(lengths)), 0) | {i: min(lengths[i], limit) for i in chosen}
    return list(counts.values())


def _common_limit(lengths: Sequence[int], most: int) -> int:
    """Return the largest limit of all responses with which they have at most ``most`` tokens together."""
    for number, length in enumerate(sorted(lengths)):
        rest = len(lengths) - number
        if length * rest > most:
            return most // rest
        most -= length
    return max(lengths, default=0)


def token_values(
    text_of: Callable[[int], str], experience: Experience, row: int, count: int, has_ref: bool = True
) -> dict[str, list[Any]]:
    """Return values of the first tokens of a response, by name.

    Args:
        text_of: function that returns the text of a token, also of a special one.
        experience: experience of the step, on the CPU.
        row: number of the response.
        count: number of tokens.
        has_ref: whether the run has a reference.

    Returns:
        ``ids``, ``texts``, log-probabilities in nats of the actor before the update (``logprob``), of the engine
        (``rollout_logprob``) and, if there is one, of the reference (``ref_logprob``), ``entropy`` of the actor's
        distribution in nats if it was evaluated, ``advantage``, importance ``weight`` in the loss, policy ``version``,
        and whether a token is ``sampled`` and ``in_loss``.
    """
    rollout = experience.rollout
    ids = rollout.response_ids[row, :count].tolist()
    numbers = {
        "logprob": experience.old_logprobs,
        "rollout_logprob": rollout.rollout_logprobs,
        **({"ref_logprob": experience.ref_logprobs} if has_ref else {}),
        **({} if experience.entropies is None else {"entropy": experience.entropies}),
        "advantage": experience.advantages,
        "weight": experience.weights,
    }
    return {
        "ids": ids,
        "texts": list(map(text_of, ids)),
        **{name: [round(value, 4) for value in values[row, :count].tolist()] for name, values in numbers.items()},
        "version": rollout.policy_version[row, :count].tolist(),
        "sampled": rollout.response_mask[row, :count].tolist(),
        "in_loss": experience.mask[row, :count].tolist(),
    }


def own_parts(prompts: Sequence[str]) -> list[str]:
    """Return prompts without the lines that all of them have in common at the start, such as examples, and at the end.

    Args:
        prompts: texts; if they are equal, they are returned as they are.
    """
    if len(set(prompts)) == 1:
        return list(prompts)
    first = prompts[0]
    same_start = min(common_prefix(first, text) for text in prompts)
    start = first.rfind("\n", 0, same_start) + 1
    same_end = min(common_prefix(first[::-1], text[start:][::-1]) for text in prompts)
    line_break = first.find("\n", len(first) - same_end)
    if line_break < 0:  # characters at the end
        left_out = 0
    else:
        left_out = len(first) - line_break
    mark = "... " if start else ""
    return [f"{mark}{text[start : len(text) - left_out]}" for text in prompts]


def group_size_of(rollout: Rollout) -> int:
    """Return the number of responses to each prompt of a rollout; 1 if all responses are given.

    Args:
        rollout: rollout of this rank.
    """
    group = rollout.group[rollout.sampled_rows]
    return max(len(group) // max(len(group.unique()), 1), 1)


def correct_answers(rollout: Rollout, batch: PromptBatch, group_size: int | None = None) -> list[Any]:
    """Return the correct answer to the prompt of each response; an empty list if the data has no answers.

    Args:
        rollout: rollout of this rank.
        batch: prompts of this rank.
        group_size: responses per prompt; None counts them.
    """
    if not isinstance(batch, PromptBatch) or "ground_truth" not in batch.column_names:  # as in a custom loop
        return []
    return [prompt.columns["ground_truth"] for prompt in _prompts_of(rollout, batch, group_size)]


def prompt_images(
    rollout: Rollout, batch: PromptBatch, group_size: int | None = None
) -> list[tuple[EncodedImage, ...]]:
    """Return the images of the prompt of each response; an empty list if the data has no images.

    Args:
        rollout: rollout of this rank.
        batch: prompts of this rank.
        group_size: responses per prompt; None counts them.
    """
    if not isinstance(batch, PromptBatch) or all(prompt.images is None for prompt in batch):
        return []
    return [prompt.tokens.encoded_images for prompt in _prompts_of(rollout, batch, group_size)]


def _prompts_of(rollout: Rollout, batch: PromptBatch, group_size: int | None) -> list[Prompt]:
    """Return the prompt of each response."""
    size = group_size or group_size_of(rollout)
    prompts = {prompt.position: prompt for prompt in batch}
    return [prompts[position // size] for position in rollout.position.tolist()]
