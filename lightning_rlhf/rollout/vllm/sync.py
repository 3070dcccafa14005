"""Transfer of weights from the trainer to vLLM through shared memory: one copy, without disk or serialization.

The memory is anonymous (memfd), so it does not use ``/dev/shm`` and is freed when the last process that maps it ends.
Receivers open it as ``/proc/<trainer>/fd/<n>``.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.models.attention import set_attention
from lightning_rlhf.models.classes import language_model_class
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.vllm.availability import lost_weights, other_rotary_factors

log = logging.getLogger(__name__)
DIRECTORY_VERSION = -1  # policy version of weights that an engine has loaded from its directory
SHARED_MEMORY = "shared_memory"  # name of this transfer in the configuration of a vLLM server
_ALIGNMENT = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LEAST_LOCKED = 1 << 20  # bytes that are locked together, so that norms do not need one call each


class PublishedNames:
    """Conversion of a model's tensors to the names and shapes of checkpoint files, which vLLM's loaders expect.

    For example, transformers stacks the experts of a layer into one tensor, but files contain one tensor per expert.
    The conversion is the same as in ``save_pretrained``.

    Args:
        directory: directory of the model's ``config.json``.
    """

    def __init__(self, directory: Path) -> None:
        config = set_attention(AutoConfig.from_pretrained(directory, trust_remote_code=False))
        with torch.device("meta"):
            self._model: Any = language_model_class(config).from_config(config, trust_remote_code=False)
        published = {name: set(self._published(name, tensor)) for name, tensor in whole_tensors(self._model)}
        counts = Counter(name for names in published.values() for name in names)
        # Tensors that are merged into one tensor of a file cannot be converted one by one and keep their names.
        self._changed = {
            name for name, names in published.items() if names != {name} and all(counts[new] == 1 for new in names)
        }

    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert tensors; those with unknown names are not changed.

        Args:
            tensors: (name in the model, tensor); each tensor is valid only until the next one.

        Yields:
            (name in files, tensor); each tensor is valid only until the next one.
        """
        for name, tensor in tensors:
            if name in self._changed:
                yield from self._published(name, tensor).items()
            else:
                yield name, tensor
            del tensor  # free it before the next one is gathered

    def _published(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(self._model, {name: tensor}))


def check_receives(directory: Path, max_tokens: int, load_format: str = "dummy") -> None:
    """Validate that vLLM loads all pushed weights of a model, and computes with them as the actor.

    Args:
        directory: directory of the model's ``config.json``.
        max_tokens: longest prompt and response together, in tokens.
        load_format: weights with which vLLM starts; only for ``dummy`` ones are weights always pushed.

    Raises:
        ValueError: some are known to be lost, or the rotary positions differ.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if load_format != "dummy":
        return
    if fault := lost_weights(config.model_type):
        raise UsageError(f"{fault}, so it would generate with old ones: use TransformersEngine")
    if fault := other_rotary_factors(config, max_tokens):
        raise UsageError(f"{fault}, or use TransformersEngine")


def in_dtype(parameters: Iterable[tuple[str, Tensor]], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with matrices cast to the engine's dtype, to transfer fewer bytes.

    Vectors (norms, biases) are not cast: they are small, and engines keep some of them in float32.

    Args:
        parameters: (name, tensor); each tensor is valid only until the next one.
        dtype: dtype of the engine's weights, for example ``bfloat16``.
    """
    for name, tensor in parameters:
        if tensor.ndim > 1 and tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype))
        yield name, tensor
        del tensor  # free it before the next one is gathered


@dataclass(frozen=True)
class Slot:
    """Location of one parameter in the shared memory.

    Args:
        name: the transformers name.
        dtype: name of the dtype, for example ``float32``.
        shape: shape of the tensor.
        offset: first byte.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int

    @classmethod
    def for_tensor(cls, name: str, tensor: Tensor, offset: int = 0) -> Slot:
        """Return the slot of a tensor."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {self.shape})"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return getattr(torch, self.dtype).itemsize * self.numel

    @property
    def end(self) -> int:
        """First byte after the parameter that is aligned for the next one; memory of zero bytes cannot be mapped."""
        return self.offset + max(-(-self.nbytes // _ALIGNMENT), 1) * _ALIGNMENT

    def view(self, memory: Tensor) -> Tensor:
        """Return the parameter as a view of the memory."""
        piece = memory[self.offset : self.offset + self.nbytes]
        return piece.view(getattr(torch, self.dtype)).view(self.shape)


def map_memory(path: str, nbytes: int) -> Tensor:
    """Map the shared memory as a tensor of bytes."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def read_slots(memory: Tensor, layout: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, view of the memory) of every parameter, in the order of writing."""
    for slot in layout:
        yield slot["name"], Slot(**slot).view(memory)


class SharedMemory:
    """Anonymous memory that grows by one parameter at a time, because the total size is unknown.

    Memory for the weights of a GPU is page-locked as it grows, in pieces of whole parameters, so that the GPU copies to
    it directly.

    Args:
        locks: whether to lock pages.
    """

    def __init__(self, locks: bool) -> None:
        self._file = os.memfd_create("lightning_rlhf_weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.is_locked = locks
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._pieces: list[Tensor] = []
        self._end = 0
        if locks:  # pages are locked by address: map once, without allocating pages that are not written
            self.bytes = map_memory(self.path, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def make_room(self, slot: Slot) -> Slot:
        """Make room for a parameter; return its slot, which may begin later."""
        if self.is_locked and slot.end > self._end:
            slot = replace(slot, offset=self._end)
            nbytes = -(-max(slot.end - slot.offset, _LEAST_LOCKED) // _PAGE) * _PAGE
            piece = self.bytes[self._end : self._end + nbytes]
            if page_lock(piece):
                self._pieces.append(piece)
                self._end += nbytes
                return slot
            self._unlock()
        if not self.is_locked:
            self._end = slot.end
            if len(self.bytes) < slot.end:
                os.truncate(self._file, slot.end)
                self.bytes = map_memory(self.path, slot.end)
        return slot

    def shrink(self) -> None:
        """Remove the part of the mapping that was not used."""
        os.truncate(self._file, self._end)
        self.bytes = self.bytes[: self._end]

    def _unlock(self) -> None:
        if self._pieces:
            torch.cuda.synchronize()  # the GPU may still copy to them
        for piece in self._pieces:
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
        self._pieces.clear()
        self.is_locked = False

    def close(self) -> None:
        """Unmap and free the memory."""
        self._unlock()
        os.close(self._file)
        self.bytes = torch.empty(0, dtype=torch.uint8)


class WeightSender:
    """The trainer's side of the shared memory. After :meth:`close` the next write allocates new memory."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._shared: SharedMemory | None = None

    def write(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Copy all parameters into the memory.

        Args:
            parameters: names and tensors, with the same names, dtypes, shapes and order in every call; each tensor is
                read before the next one is requested.

        Returns:
            :attr:`message`.

        Raises:
            RuntimeError: the parameters differ from those of the first call.
        """
        if self._slots:
            self._replace_all(parameters)
        else:
            self._append_all(parameters)
        if self._shared is not None and self._shared.is_locked:
            torch.cuda.synchronize()  # copies from the GPU do not wait
        return self.message

    @property
    def message(self) -> dict[str, Any]:
        """Arguments of :func:`map_memory` and :func:`read_slots`: ``path``, ``nbytes``, ``layout``."""
        shared = self._written
        return {"path": shared.path, "nbytes": len(shared.bytes), "layout": [asdict(slot) for slot in self._slots]}

    @property
    def _written(self) -> SharedMemory:
        if self._shared is None:
            raise RunError("no weights were written: call write() first")
        return self._shared

    def _replace_all(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        slots, shared = iter(self._slots), self._written
        for name, tensor in parameters:
            slot = next(slots, None)
            if slot is None or slot != Slot.for_tensor(name, tensor, slot.offset):
                raise _changed_parameter(Slot.for_tensor(name, tensor), slot)
            slot.view(shared.bytes).copy_(tensor, non_blocking=shared.is_locked)
            del tensor  # free it before the next one is gathered
        if (missing := next(slots, None)) is not None:
            raise _changed_parameter(None, missing)

    def _append_all(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        shared = None
        for name, tensor in parameters:
            if shared is None:
                self._shared = shared = SharedMemory(locks=tensor.is_cuda)
            slot = shared.make_room(Slot.for_tensor(name, tensor, self._slots[-1].end if self._slots else 0))
            slot.view(shared.bytes).copy_(tensor, non_blocking=shared.is_locked)
            self._slots.append(slot)
            del tensor  # free it before the next one is gathered
        if shared is None:
            raise RunError("the model has no parameters to push")
        shared.shrink()

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first parameter that differs from the last write; None if all are equal."""
        written, memory = {slot.name: slot for slot in self._slots}, self._written.bytes
        for name, tensor in parameters:
            if name not in written or not torch.equal(written.pop(name).view(memory), tensor.cpu()):
                return name
            del tensor
        return next(iter(written), None)

    def close(self) -> None:
        """Unmap and free the memory."""
        if self._shared is not None:
            self._shared.close()
        self._shared = None
        self._slots = []


def page_lock(memory: Tensor) -> bool:
    """Lock mapped memory, so that a GPU copies to it at the full speed of the bus; return whether this worked."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        with suppress(RuntimeError):  # CUDA reports an error again with the next kernel
            torch.ones(1, device="cuda")
        log.warning(
            "Weights are pushed through pageable memory, because CUDA could not lock it (error %d).", int(error)
        )
    return not int(error)


def _changed_parameter(new: Slot | None, old: Slot | None) -> RuntimeError:
    return RunError(
        f"the model changed between two pushes: expected {old or 'no more parameters'}, got {new or 'no parameter'}"
    )
