"""Part of a model that one GPU stores, by the rule of each library."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_rlhf.extras.plan.architecture import Parameter


def split_elements(parameters: Iterable[Parameter], split: int) -> int:
    """Count the elements on one rank of a tensor-parallel group of ``split`` ranks; some parameters are not split."""
    return sum(math.prod(_split_shape(parameter, split)) for parameter in parameters)


def fsdp_elements(parameters: Iterable[Parameter], ranks: int, split: int = 1) -> int:
    """Count the elements that FSDP2 stores on a rank: sum over parameters of ceil(d_0 / N) d_1 d_2 ...

    FSDP2 shards the first dimension and pads to equal parts. If N exceeds the number of experts in one tensor, it
    shards the next dimension that N divides, see :func:`~lightning_rlhf.strategies.fsdp.shard_placement`.

    Args:
        ranks: number N of data-parallel ranks.
        split: tensor-parallel size.
    """
    total = 0
    for parameter in parameters:
        shape = _split_shape(parameter, split)
        first, *rest = shape
        is_split = split > 1 and parameter.split is not None
        if len(rest) > 1 and first < ranks and not is_split and any(size % ranks == 0 for size in rest):
            total += math.prod(shape) // ranks
        else:
            total += _divide_up(first, ranks) * math.prod(rest)
    return total


def zero3_elements(parameters: Iterable[Parameter], ranks: int, persistent: int = 0) -> int:
    """Count the elements that ZeRO-3 stores on a rank: sum of ceil(d / N), plus d if d < persistent.

    Args:
        ranks: number N of data-parallel ranks.
        persistent: size below which a parameter stays gathered (``stage3_param_persistence_threshold``).
    """
    sizes = [parameter.elements for parameter in parameters]
    return sum(_divide_up(size, ranks) + (size if size < persistent else 0) for size in sizes)


def flat_elements(elements: int, ranks: int) -> int:
    """Count the elements of a rank's part of the concatenated parameters; ZeRO-1 and 2 pad to a multiple of 2 N."""
    return 2 * _divide_up(elements, 2 * ranks)


def _split_shape(parameter: Parameter, split: int) -> tuple[int, ...]:
    return tuple(
        _divide_up(size, split) if dimension == parameter.split else size
        for dimension, size in enumerate(parameter.shape)
    )


def _divide_up(number: int, parts: int) -> int:
    """Divide integers exactly, rounding up."""
    return -(-number // parts)
