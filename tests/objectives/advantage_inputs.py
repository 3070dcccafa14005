"""Batches for tests of advantage estimators."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf.objectives.base import AdvantageInputs
from tests.helpers import golden, masks, normal, pad_columns, seeds, with_garbage

TOKEN_FIELDS = ("token_rewards", "values", "sum_pi_squared", "logprobs", "weights", "ref_logprobs")
ROW_FIELDS = ("group", "final_values", "greedy_reward", "source")


def outcomes(rewards: list[float], group: list[int], lengths: list[int] | None = None) -> AdvantageInputs:
    """Return responses of the given lengths (one token by default) with their reward at the last token."""
    sizes = torch.tensor(lengths or [1] * len(rewards))
    columns = torch.arange(max(int(sizes.max()), 1))
    at_end = columns == (sizes - 1).unsqueeze(1)
    reward = torch.tensor(rewards, dtype=torch.float64).unsqueeze(1)
    return AdvantageInputs(
        token_rewards=torch.where(at_end, reward, 0.0),
        mask=columns < sizes.unsqueeze(1),
        group=torch.tensor(group),
        rewards={"only": reward.squeeze(1)},
    )


def random_inputs(mask: Tensor, group: list[int] | Tensor, seed: int) -> AdvantageInputs:
    """Return the inputs of all estimators, with NaN and infinities where the mask is False."""
    rows = len(mask)
    distributions = torch.softmax(2 * normal(*mask.shape, 6, seed=seed), dim=-1)
    named = normal(2, rows, seed=seed + 1)
    named[0] = torch.where(normal(rows, seed=seed + 2) > 1, math.nan, named[0])
    return AdvantageInputs(
        token_rewards=with_garbage(normal(*mask.shape, seed=seed + 3), mask),
        mask=mask,
        group=torch.as_tensor(group),
        values=with_garbage(normal(*mask.shape, seed=seed + 4), mask),
        final_values=normal(rows, seed=seed + 5),
        rewards={"exact": named[0], "style": named[1]},
        greedy_reward=normal(rows, seed=seed + 6),
        sum_pi_squared=with_garbage((distributions**2).sum(dim=-1), mask),
        logprobs=with_garbage(distributions[..., 0].log(), mask),
        weights=with_garbage(normal(*mask.shape, seed=seed + 7).abs(), mask),
        ref_logprobs=with_garbage(distributions[..., 1].log(), mask),
        source=torch.as_tensor(group) % 2,
    )


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 1) -> AdvantageInputs:
    """Generate ragged responses with holes, some empty, in groups of any size and order."""
    mask = draw(masks(min_rows=min_rows))
    group = draw(st.lists(st.sampled_from([3, 8, 11]), min_size=len(mask), max_size=len(mask)))
    return random_inputs(mask, group, draw(seeds))


def rows_of(inputs: AdvantageInputs, rows: Tensor | slice) -> AdvantageInputs:
    """Return the given rows of a batch, in this order."""
    tensors = {name: getattr(inputs, name) for name in (*TOKEN_FIELDS, *ROW_FIELDS, "mask")}
    return AdvantageInputs(
        **{name: None if tensor is None else tensor[rows] for name, tensor in tensors.items()},
        rewards={name: values[rows] for name, values in inputs.rewards.items()},
    )


def padded(inputs: AdvantageInputs, columns: int) -> AdvantageInputs:
    """Return the same batch with more columns that hold garbage."""
    mask = pad_columns(inputs.mask, columns)
    tensors = {name: getattr(inputs, name) for name in TOKEN_FIELDS}
    return AdvantageInputs(
        **{
            name: None if tensor is None else with_garbage(pad_columns(tensor, columns), mask)
            for name, tensor in tensors.items()
        },
        mask=mask,
        **{name: getattr(inputs, name) for name in ROW_FIELDS},
        rewards=inputs.rewards,
    )


def inside(values: Tensor, mask: Tensor) -> list[list[float]]:
    """Return the values inside the mask, in order, per row."""
    return [row[counts].tolist() for row, counts in zip(values, mask, strict=True)]


def recorded(kind: str = "whole") -> AdvantageInputs:
    """Return the inputs of golden/advantages.json; the mask is ``whole`` or ``holed``."""
    numbers = {
        name: torch.tensor(_numbers(values), dtype=torch.float64)
        for name, values in golden("advantages")["inputs"].items()
    }
    mask = numbers[kind].bool()
    return AdvantageInputs(
        token_rewards=with_garbage(numbers["rewards"], mask),
        mask=mask,
        group=numbers["group"].long(),
        values=with_garbage(numbers["values"], mask),
        final_values=numbers["final_values"],
        rewards={str(key): column for key, column in enumerate(numbers["named_rewards"].T)},
        greedy_reward=numbers["greedy_reward"],
        sum_pi_squared=with_garbage(numbers["sum_pi_squared"], mask),
        logprobs=with_garbage(numbers["logprobs"], mask),
    )


def _numbers(values: object) -> object:
    """Convert numbers of a JSON file that contains NaN as "nan"."""
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return math.nan if values == "nan" else values
