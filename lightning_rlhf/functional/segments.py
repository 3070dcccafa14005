"""Statistics over segments of rows, such as the responses to one prompt, for each row.

Everything is computed in float64, because the order of a sum is not fixed on a GPU and would change float32 results.
"""

import math

import torch
from jaxtyping import Bool, Float64, Int, Real, Shaped
from torch import Tensor


def segment_sum(values: Shaped[Tensor, "N ..."], segment: Int[Tensor, "N"]) -> Float64[Tensor, "N ..."]:
    """For each row, the sum over all rows of its segment.

    Args:
        values: finite numbers to add.
        segment: equal for rows of the same segment, in any order.
    """
    _, index = torch.unique(segment, return_inverse=True)
    values = values.double()
    return torch.zeros_like(values).index_add_(0, index, values)[index]


def segment_max(values: Real[Tensor, "N"], segment: Int[Tensor, "N"]) -> Float64[Tensor, "N"]:
    """For each row, the largest value in its segment.

    Args:
        values: may be infinite.
        segment: equal for rows of the same segment, in any order.
    """
    _, index = torch.unique(segment, return_inverse=True)
    values = values.double()
    return torch.full_like(values, -math.inf).scatter_reduce_(0, index, values, "amax")[index]


def segment_centered(
    values: Real[Tensor, "N"], segment: Int[Tensor, "N"], weights: Shaped[Tensor, "N"]
) -> Float64[Tensor, "N"]:
    """Values minus the weighted mean of their segment, and 0 where the weight is 0.

    If all values of a segment are equal, you get exactly 0. The mean of equal values contains a rounding error, which
    would otherwise count as spread, so values are measured from the smallest one.

    Args:
        values: may be anything where the weight is 0.
        segment: equal for rows of the same segment, in any order.
        weights: at least 0, or a bool mask of the rows that count.
    """
    values, outside = values.double(), weights == 0
    smallest = -segment_max(-values.masked_fill(outside, math.inf), segment)
    above = (values - smallest).masked_fill(outside, 0)
    mean = segment_sum(weights * above, segment) / segment_sum(weights, segment)
    return (above - mean).masked_fill(outside, 0)


def segment_std(
    values: Real[Tensor, "N"], segment: Int[Tensor, "N"], member: Bool[Tensor, "N"]
) -> Float64[Tensor, "N"]:
    """For each row, the standard deviation (divisor n - 1) of its segment, in two passes, 0 for fewer than two values.

    Args:
        values: may be anything where ``member`` is False.
        segment: equal for rows of the same segment, in any order.
        member: rows that count.
    """
    squares = segment_sum(segment_centered(values, segment, member) ** 2, segment)
    return (squares / (segment_sum(member, segment) - 1).clamp(min=1)).sqrt()
