"""Which share of a model one GPU holds, by the rule of each library."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_rlhf.planning.architecture import Parameter


def split_elements(parameters: Iterable[Parameter], split: int) -> int:
    """Numbers that a rank of a tensor-parallel group has: divided matrices in part, everything else whole."""
    return sum(math.prod(_split_shape(parameter, split)) for parameter in parameters)


def fsdp_elements(parameters: Iterable[Parameter], ranks: int, split: int = 1) -> int:
    """Numbers that FSDP2 stores on a rank: each parameter is cut along one dimension, and padded to equal cuts.

    sum over parameters of ceil(d_0 / N) d_1 d_2 ...

    The dimension is the first; of experts stored as one tensor, fewer than N of them, the next that N divides, see
    :func:`~lightning_rlhf.strategies.fsdp.shard_placement`.

    Args:
        parameters: of a model.
        ranks: that share it, N, tensor parallelism not counted.
        split: tensor-parallel size.
    """
    return sum(
        _fsdp_share(_split_shape(parameter, split), ranks, split > 1 and parameter.split is not None)
        for parameter in parameters
    )


def _fsdp_share(shape: tuple[int, ...], ranks: int, is_split: bool) -> int:
    first, *rest = shape
    if len(rest) > 1 and first < ranks and not is_split and any(size % ranks == 0 for size in rest):
        return math.prod(shape) // ranks
    return -(-first // ranks) * math.prod(rest)


def zero3_elements(parameters: Iterable[Parameter], ranks: int, persistent: int = 0) -> int:
    """Numbers that ZeRO-3 stores on a rank: each parameter flat, padded to equal parts; small ones also whole.

    sum over parameters of ceil(d / N), and of d where d < persistent.

    Args:
        parameters: of a model.
        ranks: that share it, N.
        persistent: size below which a parameter stays gathered (``stage3_param_persistence_threshold``).
    """
    sizes = [parameter.elements for parameter in parameters]
    return sum(-(-size // ranks) + (size if size < persistent else 0) for size in sizes)


def flat_elements(elements: int, ranks: int) -> int:
    """Numbers in a rank's part of all parameters laid end to end, as ZeRO-1 and 2 cut them: padded to 2 N."""
    return -(-elements // (2 * ranks)) * 2


def _split_shape(parameter: Parameter, split: int) -> tuple[int, ...]:
    return tuple(
        -(-size // split) if dimension == parameter.split else size for dimension, size in enumerate(parameter.shape)
    )
