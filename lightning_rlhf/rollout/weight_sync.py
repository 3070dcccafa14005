"""Weights from trainer to engine through shared memory: one copy, no disk, no serialisation.

The memory is anonymous (memfd), so it needs no space in ``/dev/shm``, has no name that could leak, and is gone with
the last process that maps it. Receivers open it as ``/proc/<trainer>/fd/<n>``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

SHARED_MEMORY = "shared_memory"  # how a vLLM server is told of this way
_ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the shared memory.

    Args:
        name: the transformers name.
        dtype: for example ``float32``.
        shape: of the tensor.
        offset: in bytes.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int

    @classmethod
    def of(cls, name: str, tensor: Tensor, offset: int = 0) -> Slot:
        """The slot that a parameter needs."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {self.shape})"

    @property
    def numel(self) -> int:
        """Elements it has."""
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return getattr(torch, self.dtype).itemsize * self.numel

    def view(self, memory: Tensor) -> Tensor:
        """The parameter as a view of the memory."""
        piece = memory[self.offset : self.offset + self.nbytes]
        return piece.view(getattr(torch, self.dtype)).view(self.shape)


def map_memory(path: str, nbytes: int) -> Tensor:
    """The shared memory as bytes."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def read_slots(memory: Tensor, layout: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """(name, view) of every parameter, in the order they were written."""
    for slot in layout:
        yield slot["name"], Slot(**slot).view(memory)


def in_dtype(parameters: Iterable[tuple[str, Tensor]], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with matrices cast to the engine's dtype, so that no more bytes are sent than it keeps.

    Vectors (norms, biases, the routing bias of experts) stay as they are: they are small, and engines keep some of them
    in float32.

    Args:
        parameters: (name, tensor), each valid only until the next.
        dtype: dtype of the engine's weights, for example ``bfloat16``.
    """
    for name, tensor in parameters:
        if tensor.ndim > 1 and tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype))
        yield name, tensor
        del tensor  # or two would be held while the next is gathered


class WeightSender:
    """The trainer's side: writes parameters where engines read them. After :meth:`close` it starts anew."""

    def __init__(self) -> None:
        self._file = -1
        self._slots: list[Slot] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def write(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Copy all parameters in.

        Args:
            parameters: (name, tensor), each needed only until the next; the same ones at every call.

        Returns:
            :attr:`message`.

        Raises:
            RuntimeError: the parameters are not those of the first call.
        """
        if self._slots:
            self._replace_all(parameters)
        else:
            self._append_all(parameters)
        return self.message

    @property
    def message(self) -> dict[str, Any]:
        """What :func:`map_memory` and :func:`read_slots` need: ``path``, ``nbytes``, ``layout``."""
        layout = [asdict(slot) for slot in self._slots]
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "nbytes": len(self._memory), "layout": layout}

    def _replace_all(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        slots = iter(self._slots)
        for name, tensor in parameters:
            slot = next(slots, None)
            if slot is None or slot != Slot.of(name, tensor, slot.offset):
                raise _changed(Slot.of(name, tensor), slot)
            slot.view(self._memory).copy_(tensor)
            del tensor  # or two would be held while the next is gathered
        if (missing := next(slots, None)) is not None:
            raise _changed(None, missing)

    def _append_all(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        # The first pass learns the sizes one parameter at a time, because a sharded role never holds them all.
        self._file = os.memfd_create("lightning_rlhf_weights")
        end = 0
        for name, tensor in parameters:
            slot = Slot.of(name, tensor, offset=end)
            end += max(-(-slot.nbytes // _ALIGNMENT), 1) * _ALIGNMENT  # memory of no bytes cannot be mapped
            os.truncate(self._file, end)
            self._memory = map_memory(f"/proc/{os.getpid()}/fd/{self._file}", end)
            slot.view(self._memory).copy_(tensor)
            self._slots.append(slot)
            del tensor

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Name of the first parameter that differs from what was last written; None if all are equal."""
        written = {slot.name: slot for slot in self._slots}
        for name, tensor in parameters:
            if name not in written or not torch.equal(written.pop(name).view(self._memory), tensor.cpu()):
                return name
            del tensor
        return next(iter(written), None)

    def close(self) -> None:
        """Unmap and free the memory."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._slots = []
            self._memory = torch.empty(0, dtype=torch.uint8)


def _changed(came: Slot | None, before: Slot | None) -> RuntimeError:
    return RuntimeError(f"{came or 'nothing'} came where {before or 'nothing'} was pushed before: the model changed")
