"""Runs of :mod:`tests.distributed.tasks` with oneDNN's matrix products on any CPU; see :func:`train`."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

from lightning_rlhf.functional import products
from tests.distributed import tasks


def train(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train the runs in order; ``shapes`` of each result are those of the weights that oneDNN multiplied."""
    return [_train(run) for run in runs]


def _train(run: dict[str, Any]) -> dict[str, Any]:
    shapes: set[tuple[int, ...]] = set()
    product = products._onednn

    def noted(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.add(tuple(weight.shape))
        return product(states, weight, bias)

    with mock.patch.object(products, "_has_onednn", return_value=True), mock.patch.object(products, "_onednn", noted):
        (result,) = tasks.train([run])
    return result | {"shapes": sorted(shapes)}


def by_torch(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train the runs in order with torch's products, as on a CPU without AVX-512."""
    with mock.patch.object(products, "_has_onednn", return_value=False):
        return tasks.train(runs)
