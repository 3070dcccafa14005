"""Batches of sequences: padding, concatenation, prompts joined with responses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_rlhf.types import AllowedTokens, Rollout, RoutedExperts, SequenceBatch, TensorBatch


def pad_right(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Stack rows of differing lengths.

    Args:
        rows: B lists of token ids.
        pad: padding value.

    Returns:
        ids: (B, L) int64, L the longest row.
        lengths: (B,) int64.
    """
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, lengths


def join(rollout: Rollout, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Join each prompt with its response.

    Args:
        rollout: B rows.
        width: width L of the result; None uses the longest prompt with response, for which the host waits for a GPU.

    Returns:
        input_ids: (B, L) int64, right-padded with 0.
        index: (B, T) int64, position of the hidden state that predicts each response token, and at which a critic's
            value is the one *before* that token; clamped to the last position beyond the response.
    """
    prompt, response = rollout.prompt_lengths.unsqueeze(1), rollout.response_lengths.unsqueeze(1)
    width = int(rollout.total_lengths.max()) if width is None else width
    position = torch.arange(width, device=prompt.device).unsqueeze(0)
    from_prompt = rollout.prompt_ids.gather(
        1, position.clamp(max=rollout.prompt_ids.shape[1] - 1).expand(len(prompt), -1)
    )
    offset = (position - prompt).clamp(0, rollout.response_ids.shape[1] - 1)
    input_ids = torch.where(position < prompt, from_prompt, rollout.response_ids.gather(1, offset))
    input_ids = input_ids.masked_fill(position >= prompt + response, 0)
    step = torch.arange(rollout.response_ids.shape[1], device=prompt.device).unsqueeze(0)
    return input_ids, (prompt - 1 + step).clamp(max=input_ids.shape[1] - 1)


def concat_texts(texts: Sequence[SequenceBatch]) -> SequenceBatch:
    """Concatenate batches of texts, cut or padded to the longest text.

    Args:
        texts: at least one batch.
    """
    lengths = torch.cat([batch.lengths for batch in texts])
    width = int(lengths.max())

    def widened(rows: Tensor) -> Tensor:
        return functional.pad(rows[:, :width], (0, width - rows[:, :width].shape[1]))

    ids = torch.cat([widened(batch.input_ids) for batch in texts])
    masks = torch.cat([widened(batch.loss_mask) for batch in texts])
    images = [batch.images for batch in texts if batch.images is not None]
    batch = SequenceBatch(ids, lengths, masks, torch.cat(images) if images else None)
    if all(part.text_starts is None for part in texts):
        return batch
    starts = [torch.zeros_like(part.loss_mask) if part.text_starts is None else part.text_starts for part in texts]
    shared = [torch.zeros_like(part.lengths) if part.shared is None else part.shared for part in texts]
    return dataclasses.replace(batch, text_starts=torch.cat(list(map(widened, starts))), shared=torch.cat(shared))


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts, padded to the widest; group numbers are shifted, so that groups stay distinct.

    Args:
        rollouts: at least one, all with the same names of rewards and the same temperature.
    """
    width = max(rollout.response_ids.shape[1] for rollout in rollouts)
    allowed = [rollout.allowed for rollout in rollouts]
    routed = next((rollout.experts for rollout in rollouts if rollout.experts is not None), None)
    parts = [dataclasses.replace(each, allowed=None, experts=_experts(each, routed)) for each in rollouts]
    joined: Rollout = _joined(parts)
    first = torch.tensor([0, *(int(rollout.group.max()) + 1 for rollout in rollouts[:-1])]).cumsum(0)
    group = torch.cat([rollout.group + start for rollout, start in zip(rollouts, first, strict=True)])
    known = [each for each in allowed if each is not None]
    if len(known) == len(rollouts):  # otherwise the module finds them for all
        wide = [each.map(lambda values: functional.pad(values, (0, width - values.shape[1]))) for each in known]
        joined = dataclasses.replace(joined, allowed=AllowedTokens.join(wide))
    return dataclasses.replace(joined, group=group)


def _experts(rollout: Rollout, others: RoutedExperts | None) -> RoutedExperts | None:
    """Return the experts of a rollout; unknown ones in the layers of others if it has none."""
    if rollout.experts is not None or others is None:
        return rollout.experts
    return dataclasses.replace(others, numbers=torch.zeros_like(others.numbers[:1]).repeat(len(rollout), 1))


def _joined(values: Sequence[Any]) -> Any:
    """Return the rows of a field of several batches together; of other values than tensors, the first one."""
    first = values[0]
    if isinstance(first, TensorBatch):
        names = [field.name for field in dataclasses.fields(first)]
        parts = {name: _joined([getattr(value, name) for value in values]) for name in names}
        return type(first)(**parts)
    if isinstance(first, Mapping):
        names = list(dict.fromkeys(name for value in values for name in value))
        return {name: _joined([value[name] for value in values if name in value]) for name in names}
    if not isinstance(first, Tensor):
        return first
    if first.ndim == 2:
        width = max(value.shape[1] for value in values)
        values = [functional.pad(value, (0, width - value.shape[1])) for value in values]
    return torch.cat(list(values))
