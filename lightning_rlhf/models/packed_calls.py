"""Which parts of a packed row share a call of attention, where no kernel takes texts of several lengths."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rlhf.batching.packing import PackedLengths

ALIGNMENT = 8  # elements; torch's kernels on GPUs copy masks with other strides
# Texts share a call if its padding adds at most a quarter to the weights of pairs of tokens, or at most as many as
# would take the time of a call. Masks of long texts would be too large.
_PADDING = 1.25
_CALL_WEIGHTS = 2048
_MASK_WEIGHTS = 1 << 20
_MOST_TEXTS = 128


class Text(NamedTuple):
    """A part of a packed row: a prompt, or a response that also attends to its prompt.

    Args:
        prompt: number of tokens of the prompt of a response; 0 for a prompt.
        tokens: number of tokens of the part, at least 1.
        prompt_start: place in the row.
        start: place in the row.
    """

    prompt: int
    tokens: int
    prompt_start: int
    start: int


class Call(NamedTuple):
    """Texts in a call of attention, a row each, with padding left of the prompts and right of the texts.

    Args:
        texts: G, number of rows.
        queries: R, tokens of the longest text.
        keys: K, R and the tokens of the longest prompt.
        mask: (G, 1, R, K), added to logits; None if all prompts have the same length.
    """

    texts: int
    queries: int
    keys: int
    mask: Tensor | None


class CallLayout(NamedTuple):
    """The calls for a packed row, and the tokens of all their rows.

    Args:
        queries: int64 places of the queries in the packed row; None if they are the packed row as it is.
        keys: int64 places of the keys; None as above.
        places: (N,) int64, places of the packed row's tokens among the queries; None as above.
    """

    calls: list[Call]
    queries: Tensor | None
    keys: Tensor | None
    places: Tensor | None


@lru_cache(maxsize=8)
def layout_of_calls(lengths: PackedLengths, window: int | None, dtype: torch.dtype, device: torch.device) -> CallLayout:
    """Return the calls for a packed row; computed once for all layers.

    Args:
        window: number of tokens that a token attends to, its own included; None is all before it.
        dtype: dtype of the masks, which is that of the queries, or each layer would copy them.
    """
    calls: list[Call] = []
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    with torch.inference_mode(False):  # a validation may make it, and training use it
        places = torch.zeros(lengths.tokens, dtype=torch.int64)
        for texts in texts_of_calls(lengths):
            prompts, tokens, prompt_starts, starts = torch.tensor(texts).T.unsqueeze(2)
            before, longest = int(prompts.max()), int(tokens.max())
            step, padding = torch.arange(longest), before - prompts
            own = starts + torch.minimum(step, tokens - 1)
            of_prompts = prompt_starts + (torch.arange(before) - padding).clamp(min=0)
            is_text = step < tokens
            places[own[is_text]] = is_text.flatten().nonzero().squeeze(1) + sum(len(each) for each in queries)
            queries.append(own.flatten())
            keys.append(torch.cat([of_prompts, own], dim=1).flatten())
            mask = _mask(padding, longest, before, window, dtype).to(device) if padding.any() else None
            calls.append(Call(len(texts), longest, before + longest, mask))
        row = torch.arange(lengths.tokens)
        indices = (torch.cat(queries), torch.cat(keys), places)
        return CallLayout(calls, *(None if torch.equal(index, row) else index.to(device) for index in indices))


def texts_of_calls(lengths: PackedLengths) -> list[list[Text]]:
    """Divide the parts of a row into calls, so that few calls have little padding."""
    prompt_starts = list(itertools.accumulate(lengths.prompts, initial=0))
    texts = [Text(0, tokens, 0, start) for tokens, start in zip(lengths.prompts, prompt_starts, strict=False)]
    start = prompt_starts.pop()
    for prompt, prompt_start, responses in zip(lengths.prompts, prompt_starts, lengths.responses, strict=True):
        for tokens in responses:
            texts.append(Text(prompt, tokens, prompt_start, start))
            start += tokens
    calls: list[list[Text]] = []
    for text in sorted(texts, key=lambda text: (text.prompt > 0, text.prompt + text.tokens, text.tokens)):
        if text.tokens and calls and _share_a_call([*calls[-1], text]):
            calls[-1].append(text)
        elif text.tokens:
            calls.append([text])
    return sorted(calls, key=lambda call: call[0].start)


def _share_a_call(texts: list[Text]) -> bool:
    """Return whether one call for these texts costs less than several."""
    prompts = [text.prompt for text in texts]
    longest = max(text.tokens for text in texts)
    weights = sum(text.tokens * (text.prompt + text.tokens) for text in texts)
    padded = len(texts) * longest * (max(prompts) + longest)
    needs_mask = min(prompts) < max(prompts)
    if len(texts) > _MOST_TEXTS or (needs_mask and (padded > _MASK_WEIGHTS or not min(prompts))):
        return False
    return padded <= max(_PADDING * weights, weights + _CALL_WEIGHTS)


def _mask(padding: Tensor, queries: int, before: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the mask of a :class:`Call` whose rows have (G, 1) numbers of padding tokens before their prompts."""
    keys = torch.arange(before + queries)
    distance = torch.arange(before, before + queries).unsqueeze(1) - keys
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    hidden = (hidden | (keys < padding.unsqueeze(2))).unsqueeze(1)
    width = rounded_up(len(keys), ALIGNMENT)
    return torch.zeros(len(padding), 1, queries, width, dtype=dtype)[..., : len(keys)].masked_fill_(hidden, -torch.inf)


def rounded_up(number: int, step: int, remainder: int = 0) -> int:
    """Return the smallest integer from ``number`` on that leaves this remainder when divided by ``step``."""
    return number + (remainder - number) % step
