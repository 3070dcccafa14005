"""Helpers of several tests: a strict comparison, simulated ranks, recorded numbers, small random batches."""

import importlib
import inspect
import json
import os
import pkgutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_rlhf import objectives
from lightning_rlhf.extras import algorithms
from lightning_rlhf.functional.data_ranks import DataRanks

T = TypeVar("T")

# The same examples on every machine: a property that fails, fails for everyone. `make test-all` tries more of them.
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "25"))
properties = settings(deadline=None, derandomize=True, database=None, max_examples=EXAMPLES)
seeds = st.integers(0, 2**32 - 1)


def assert_close(
    actual: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-7, equal_nan: bool = False
) -> None:
    """Assert that shapes are equal and |actual - expected| <= atol + rtol |expected|, in float64.

    Tolerances above 1e-2 raise a ValueError, because such a comparison would hide real errors.
    """
    if not (0 <= rtol <= 1e-2 and 0 <= atol <= 1e-2):
        raise ValueError(f"rtol and atol must lie in [0, 1e-2], got rtol={rtol}, atol={atol}")
    actual, expected = (_float64(value) for value in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)


def _float64(value: Any) -> Tensor:
    # By default a list of Python numbers would become float32, too imprecise for strict tolerances.
    return value.detach().double() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)


class ThreadRanks(DataRanks):
    """A rank in a thread; see :func:`over_ranks`."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slot, self._slots, self._barrier = rank, slots, barrier

    def _all(self, value: Tensor) -> list[Tensor]:
        self._slots[self._slot] = value
        self._barrier.wait()
        every = list(self._slots)
        self._barrier.wait()
        return every

    def sum(self, value: Tensor) -> Tensor:
        return torch.stack(self._all(value)).sum(dim=0)

    def max(self, value: Tensor) -> Tensor:
        return torch.stack(self._all(value)).amax(dim=0)

    def gather(self, value: Tensor) -> Tensor:
        return torch.cat(self._all(value))


def over_ranks(*ranks: Callable[[DataRanks], T]) -> list[T]:
    """Run every function as one rank in its own thread and return what each returned.

    Ranks that exchange a different number of times, which would hang a real job, break the barrier and fail the test.
    """
    barrier = threading.Barrier(len(ranks), timeout=10)
    slots: list[Any] = [None] * len(ranks)

    def run(rank: int) -> T:
        try:
            result = ranks[rank](ThreadRanks(rank, slots, barrier))
            barrier.wait()
        except BaseException:
            barrier.abort()  # or the other ranks would wait for this one
            raise
        return result

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, range(len(ranks))))


def golden(name: str) -> Any:
    """Return numbers recorded from another library; see golden/README.md."""
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def float64(rows: Any) -> Tensor:
    """Return a float64 tensor, in which tests can compare tightly."""
    return torch.tensor(rows, dtype=torch.float64)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard normal numbers that depend only on the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@st.composite
def masks(draw: st.DrawFn, min_rows: int = 1) -> Tensor:
    """Generate (B, T) bool masks: ragged, with holes, possibly empty."""
    rows, columns = draw(st.integers(min_rows, 5)), draw(st.integers(1, 7))
    cells = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(cells).view(rows, columns)


def with_garbage(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values inside the mask, and NaN and infinities outside it."""
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=values.dtype).repeat(values.numel())
    return torch.where(mask, values, garbage[: values.numel()].view(values.shape))


def pad_columns(tensor: Tensor, columns: int) -> Tensor:
    """Return the same rows with more columns on the right, filled with zeros."""
    return torch.nn.functional.pad(tensor, (0, columns))


def concrete_objectives(kind):
    """Return the objectives of the core and of the extra ``algorithms`` that derive from ``kind``, with a formula."""
    classes = {}
    modules = [
        *pkgutil.iter_modules(objectives.__path__, "lightning_rlhf.objectives."),
        *pkgutil.iter_modules(algorithms.__path__, "lightning_rlhf.extras.algorithms."),
    ]
    for module in modules:
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and issubclass(value, kind) and not inspect.isabstract(value):
                classes[name] = value
    classes.pop("FunctionLoss", None)  # its formula is that of a function
    return list(classes.values())
