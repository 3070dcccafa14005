"""Texts in one row without padding, in which the responses to a prompt can share it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class PackedLengths(NamedTuple):
    """Lengths of the parts of a packed row: first all prompts, then the responses to the first prompt, and so on.

    A token attends to the tokens before it in its part; a response also to its whole prompt. A text that shares nothing
    is a prompt without responses.

    Args:
        prompts: number of tokens of each prompt.
        responses: number of tokens of each response to each prompt.
    """

    prompts: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of the row."""
        return sum(self.prompts) + sum(map(sum, self.responses))


@dataclass(frozen=True)
class Packing:
    """Places of the tokens of B texts in one row of N tokens.

    Args:
        lengths: lengths of the parts of the row.
        tokens: (N,) int64, place of each token of the row in the flattened (B, L) padded texts.
        positions: (1, N) int64, position of each token in its text.
        shared: (B,) int64, number of first tokens of each text that lie in its prompt's part.
        prompt_starts: (B,) int64, place in the row at which the prompt of each text begins.
        response_starts: (B,) int64, place in the row at which the rest of each text begins.
        ends: (B,) int64, last position of each text.
        padded_index: (B, L) int64, place of each token of the texts, if they are in padded rows or rows have several
            texts; None: the places follow from ``shared``, ``prompt_starts`` and ``response_starts``.
        width: width of the padded rows; None: one row.
    """

    lengths: PackedLengths
    tokens: Tensor
    positions: Tensor
    shared: Tensor
    prompt_starts: Tensor
    response_starts: Tensor
    ends: Tensor
    padded_index: Tensor | None = None
    width: int | None = None

    def row_index(self, index: Tensor) -> Tensor:
        """Return the places in the row of (B, T) positions in the texts, at most the last one of each text."""
        index = torch.minimum(index, self.ends.unsqueeze(1))
        if self.padded_index is not None:
            return self.padded_index.gather(1, index)
        in_response = index - self.shared.unsqueeze(1)
        in_prompt = self.prompt_starts.unsqueeze(1) + index
        return torch.where(in_response < 0, in_prompt, self.response_starts.unsqueeze(1) + in_response)


def pad_parts(
    lengths: Sequence[int], breaks: Sequence[Sequence[int]], width: int, device: torch.device | str = "cpu"
) -> Packing:
    """Lay out the parts of each row in a padded row each, for models that do not separate texts in one row.

    Args:
        lengths: number of tokens of each of B rows, at least 1.
        breaks: positions in each row at which a further text begins.
        width: L, the width of the rows.
        device: device of the result.
    """
    parts = [(row, *part) for row, inner in enumerate(breaks) for part in itertools.pairwise([0, *inner, lengths[row]])]
    widest = max(last - first for _, first, last in parts)
    tokens, index = torch.zeros(len(parts), widest, dtype=torch.int64), torch.zeros(len(lengths), width).long()
    for number, (row, first, last) in enumerate(parts):
        tokens[number, : last - first] = row * width + torch.arange(first, last)
        index[row, first:last] = number * widest + torch.arange(last - first)
    none = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    return Packing(
        lengths=PackedLengths((), ()),
        tokens=tokens.flatten().to(device),
        positions=none.unsqueeze(0),
        shared=none,
        prompt_starts=none,
        response_starts=none,
        ends=torch.tensor(lengths, device=device) - 1,
        padded_index=index.to(device),
        width=widest,
    )


def pack_texts(
    lengths: Sequence[int], width: int, device: torch.device | str = "cpu", breaks: Sequence[Sequence[int]] = ()
) -> Packing:
    """Lay out texts one after the other.

    Args:
        lengths: number of tokens of each of B texts, at least 1.
        width: L, the width of the padded texts.
        device: device of the result.
        breaks: argument of :func:`pack_responses`.
    """
    rows = len(lengths)
    return pack_responses(lengths, [0] * rows, range(rows), width, device=device, breaks=breaks)


def pack_turns(
    lengths: Sequence[int],
    breaks: Sequence[Sequence[int]],
    shared: Sequence[int],
    width: int,
    device: torch.device | str = "cpu",
) -> Packing:
    """Lay out rows of several texts; the first tokens that all texts of a row have in common are laid out once.

    Args:
        lengths: number of tokens of each of B rows, at least 1.
        breaks: positions in each row at which a further text begins.
        shared: number of common first tokens of the texts of each row, less than any text has.
        width: L, the width of the padded rows.
        device: device of the result.
    """
    texts = [list(itertools.pairwise([0, *inner, lengths[row]])) for row, inner in enumerate(breaks)]
    common = [shared[row] if len(parts) > 1 else 0 for row, parts in enumerate(texts)]
    # Pairs of a row and the places in it of a part that is laid out; without common tokens, each text is a prompt.
    prompts = [
        (row, first, first + common[row] if common[row] else last)
        for row, parts in enumerate(texts)
        for first, last in (parts[:1] if common[row] else parts)
    ]
    responses = [
        [(row, first + common[row], last) for first, last in texts[row]] if common[row] else [] for row, *_ in prompts
    ]
    parts = [*prompts, *itertools.chain(*responses)]
    starts = itertools.accumulate((last - first for _, first, last in parts), initial=0)
    index = torch.zeros(len(lengths), width, dtype=torch.int64)
    positions = []
    for (row, first, last), start in zip(parts, starts, strict=False):
        text = max(place for place, _ in texts[row] if place <= first)
        positions.append(torch.arange(first - text, last - text))
        copies = [place for place, _ in texts[row]] if common[row] and first == 0 else [first]
        for copy in copies:
            index[row, copy : copy + last - first] = torch.arange(start, start + last - first)
    none = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    return Packing(
        lengths=PackedLengths(
            tuple(last - first for _, first, last in prompts),
            tuple(tuple(last - first for _, first, last in of_prompt) for of_prompt in responses),
        ),
        tokens=torch.cat([torch.arange(first, last) + row * width for row, first, last in parts]).to(device),
        positions=torch.cat(positions).unsqueeze(0).to(device),
        shared=none,
        prompt_starts=none,
        response_starts=none,
        ends=torch.tensor(lengths, device=device) - 1,
        padded_index=index.to(device),
    )


def pack_responses(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    groups: Sequence[int],
    width: int,
    device: torch.device | str = "cpu",
    breaks: Sequence[Sequence[int]] = (),
) -> Packing:
    """Lay out each prompt once, and the responses to it; a prompt with one response is laid out as one text.

    Args:
        prompt_lengths: number of tokens of the prompt of each of B texts, at least 1.
        response_lengths: number of tokens of each response.
        groups: number of the prompt of each text; texts with the same number have the same prompt.
        width: L, the width of the padded texts, in which a response follows its prompt.
        device: device of the result.
        breaks: positions in each row at which a further text begins; such a row has its own number of a prompt. Empty
            for rows of one text.
    """
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    totals = [prompt + response for prompt, response in zip(prompt_lengths, response_lengths, strict=True)]
    shared = {group: prompt_lengths[rows[0]] if len(rows) > 1 else totals[rows[0]] for group, rows in rows_of.items()}
    order = [row for rows in rows_of.values() for row in rows]
    parts = [(rows[0], 0, shared[group]) for group, rows in rows_of.items()]
    parts += [(row, shared[groups[row]], totals[row]) for row in order]
    starts = [0, *itertools.accumulate(last - first for _, first, last in parts)]
    prompt_starts = dict(zip(rows_of, starts, strict=False))
    response_starts = dict(zip(order, starts[len(rows_of) :], strict=False))
    bounds = [_bounds(part, breaks) for part in parts]
    positions = torch.cat([_positions(edges) for edges in bounds])
    tokens = torch.cat([torch.arange(first, last) + row * width for row, first, last in parts])
    by_row = torch.tensor(
        [
            [shared[group], prompt_starts[group], response_starts[row], totals[row] - 1]
            for row, group in enumerate(groups)
        ]
    )
    # One copy to the device for all of them.
    copied = torch.cat([tokens, positions, by_row.T.flatten()]).to(device)
    tokens, positions, by_row = copied.split([len(tokens), len(positions), by_row.numel()])
    shared_tokens, prompt_places, response_places, ends = by_row.view(4, -1)
    responses = tuple(
        tuple(totals[row] - shared[group] for row in rows if totals[row] > shared[group])
        for group, rows in rows_of.items()
    )
    texts = [[last - first for first, last in itertools.pairwise(edges)] for edges in bounds[: len(rows_of)]]
    # Only rows without responses have several texts.
    responses = tuple(
        response for part, first in zip(texts, responses, strict=True) for response in [first, *[()] * len(part[1:])]
    )
    return Packing(
        lengths=PackedLengths(tuple(itertools.chain(*texts)), responses),
        tokens=tokens,
        positions=positions.unsqueeze(0),
        shared=shared_tokens,
        prompt_starts=prompt_places,
        response_starts=response_places,
        ends=ends,
    )


def _bounds(part: tuple[int, int, int], breaks: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions in a row at which its texts begin, and the end; for the rest of a row, begin and end."""
    row, first, last = part
    return [first, *(breaks[row] if breaks and first == 0 else ()), last]


def _positions(bounds: list[int]) -> Tensor:
    """Return the positions of tokens in their texts; those of the first text begin at its place in the row."""
    parts = [torch.arange(first, last) for first, last in itertools.pairwise(bounds)]
    return torch.cat([parts[0], *(part - part[:1] for part in parts[1:])])
