"""Prompt and response joined into one right-padded sequence, and where in it each response token is predicted."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lightning_rlhf.types import Rollout, SequenceBatch, UnpairedBatch


def pad_right(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Stack rows of differing lengths.

    Args:
        rows: B lists of token ids.
        pad: fills the rest; never seen by a real token.

    Returns:
        ids: (B, L) int64, L the longest row.
        lengths: (B,) int64.
    """
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, lengths


def join(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Put each response right behind its prompt.

    Returns:
        input_ids: (B, L) int64, right-padded with 0, L the longest prompt with response.
        index: (B, T) int64, position of the hidden state that predicts each response token, and at which a critic's
            value is the one *before* that token; clamped to the last position beyond the response.
    """
    prompt, response = rollout.prompt_lengths.unsqueeze(1), rollout.response_lengths.unsqueeze(1)
    position = torch.arange(int(rollout.total_lengths.max()), device=prompt.device).unsqueeze(0)
    from_prompt = rollout.prompt_ids.gather(
        1, position.clamp(max=rollout.prompt_ids.shape[1] - 1).expand(len(prompt), -1)
    )
    offset = (position - prompt).clamp(0, rollout.response_ids.shape[1] - 1)
    input_ids = torch.where(position < prompt, from_prompt, rollout.response_ids.gather(1, offset))
    input_ids = input_ids.masked_fill(position >= prompt + response, 0)
    step = torch.arange(rollout.response_ids.shape[1], device=prompt.device).unsqueeze(0)
    return input_ids, (prompt - 1 + step).clamp(max=input_ids.shape[1] - 1)


def below(texts: Sequence[SequenceBatch]) -> SequenceBatch:
    """Texts below each other, cut or padded to the longest.

    Args:
        texts: at least one batch.
    """
    lengths = torch.cat([batch.lengths for batch in texts])
    width = int(lengths.max())

    def widened(rows: Tensor) -> Tensor:
        return functional.pad(rows[:, :width], (0, width - rows[:, :width].shape[1]))

    ids, masks = ([widened(getattr(batch, name)) for batch in texts] for name in ("input_ids", "loss_mask"))
    return SequenceBatch(torch.cat(ids), lengths, torch.cat(masks))


def mismatched(batch: UnpairedBatch, gather: Callable[[Tensor], Tensor]) -> SequenceBatch:
    """Each prompt of this rank's share with the answer of the next text in the whole batch; the last has the first's.

    An answer is cut where it would make a text longer than any of the batch, so that it fits where they do.

    Args:
        batch: this rank's share.
        gather: brings the rows of all ranks together.
    """
    # Rows are cut one by one, so they are copied to the host once.
    texts, places = batch.texts.map(gather).to("cpu"), gather(batch.place).cpu()
    starts = torch.where(texts.loss_mask.any(dim=1), texts.loss_mask.long().argmax(dim=1), texts.lengths)
    order = places.argsort()
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    rows, masks = [], []
    for place in batch.place.tolist():
        own = int((places == place).nonzero())
        other, start = int(following[own]), int(starts[own])
        end = min(int(texts.lengths[other]), int(starts[other]) + int(texts.lengths.max()) - start)
        answer = slice(int(starts[other]), end)
        rows.append([*texts.input_ids[own, :start].tolist(), *texts.input_ids[other, answer].tolist()])
        masks.append([*([False] * start), *texts.loss_mask[other, answer].tolist()])
    (ids, lengths), (marked, _) = pad_right(rows), pad_right(masks)
    return SequenceBatch(ids, lengths, marked.bool()).to(batch.place.device)


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """Rollouts below each other, padded to the widest; groups are numbered on, so that none meets another's.

    Args:
        rollouts: at least one, with the same rewards and one temperature.
    """
    fields = {}
    for name in (field.name for field in dataclasses.fields(Rollout) if field.name not in ("rewards", "temperature")):
        columns = [getattr(rollout, name) for rollout in rollouts]
        if columns[0].ndim == 2:
            width = max(column.shape[1] for column in columns)
            columns = [functional.pad(column, (0, width - column.shape[1])) for column in columns]
        fields[name] = torch.cat(columns)
    first = torch.tensor([0, *(int(rollout.group.max()) + 1 for rollout in rollouts[:-1])]).cumsum(0)
    fields["group"] = torch.cat([rollout.group + start for rollout, start in zip(rollouts, first, strict=True)])
    rewards = {name: torch.cat([rollout.rewards[name] for rollout in rollouts]) for name in rollouts[0].rewards}
    return Rollout(**fields, rewards=rewards, temperature=rollouts[0].temperature)
