"""Base class of batches of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

_Batch = TypeVar("_Batch", bound="TensorBatch")


@dataclass(frozen=True)
class TensorBatch:
    """Base class of dataclasses of tensors with equal numbers of rows, which are moved and indexed together."""

    def __len__(self) -> int:
        return len(next(iter(self._rows())))

    @property
    def total_lengths(self) -> Tensor:
        """(B,) number of tokens of each row in a model's input; both texts of a pair are padded to the longer one."""
        raise NotImplementedError

    @property
    def real_lengths(self) -> Tensor:
        """(B,) number of tokens of each row if rows are packed without padding."""
        return self.total_lengths

    def prompt_numbers(self) -> Tensor | None:
        """Return the (3, B) number of each row's prompt and the tokens of prompt and response; None without them.

        Rows with the same number have the same prompt, which a packed row of tokens contains once.
        """
        return None

    def _rows(self) -> Iterator[Tensor]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, TensorBatch):
                yield from value._rows()
            elif isinstance(value, Tensor):
                yield value

    def map(self: _Batch, function: Callable[[Tensor], Tensor]) -> _Batch:
        """Apply a function to every tensor of the batch."""

        def convert(value: Any) -> Any:
            if isinstance(value, TensorBatch):
                return value.map(function)
            if isinstance(value, Tensor):
                return function(value)
            if isinstance(value, Mapping):
                return {key: convert(item) for key, item in value.items()}
            return value

        return dataclasses.replace(self, **{f.name: convert(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def to(self: _Batch, device: torch.device | str, **kwargs: Any) -> _Batch:
        """Move the batch to a device."""
        return self.map(lambda tensor: tensor.to(device, **kwargs))

    def __getitem__(self: _Batch, rows: Tensor | Sequence[int]) -> _Batch:
        """Return the rows with the given indices, or those for which a mask is True."""
        index = torch.as_tensor(rows)
        index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index.long()
        return self.map(lambda tensor: tensor[index.to(tensor.device)])


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...] | torch.Size) -> None:
    """Validate the shape of a tensor.

    Raises:
        ValueError: the shape differs; the message contains the name and both shapes.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
