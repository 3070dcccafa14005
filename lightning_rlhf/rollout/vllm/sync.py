"""Transfer of weights from the trainer to vLLM through shared memory: one copy, without disk or serialization.

The memory is anonymous (memfd), so it does not use ``/dev/shm`` and is freed when the last process that maps it ends.
Receivers open it as ``/proc/<trainer>/fd/<n>``.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from lightning_rlhf.attention import set_attention
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.models.classes import language_model_class
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.vllm.availability import lost_weights

log = logging.getLogger(__name__)
DIRECTORY_VERSION = -1  # policy version of weights that an engine has loaded from its directory
SHARED_MEMORY = "shared_memory"  # name of this transfer in the configuration of a vLLM server
_ALIGNMENT = 64


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


def check_receives(directory: Path, load_format: str = "dummy") -> None:
    """Validate that vLLM loads all pushed weights of a model.

    Args:
        directory: directory of the model's ``config.json``.
        load_format: weights with which vLLM starts; only for ``dummy`` ones are weights always pushed.

    Raises:
        ValueError: some are known to be lost.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if load_format == "dummy" and (fault := lost_weights(config.model_type)):
        raise UsageError(f"{fault}, so it would generate with old ones: use TransformersEngine")


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


class WeightSender:
    """The trainer's side of the shared memory. After :meth:`close` the next write allocates new memory."""

    def __init__(self) -> None:
        self._file = -1
        self._slots: list[Slot] = []
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False  # whether the memory is page-locked, so that a GPU copies to it directly

    def write(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Copy all parameters into the memory.

        Args:
            parameters: (name, tensor) with the same names, dtypes, shapes and order in every call; each tensor is read
                before the next one is requested.

        Returns:
            :attr:`message`.

        Raises:
            RuntimeError: the parameters differ from those of the first call.
        """
        if self._slots:
            self._replace_all(parameters)
        else:
            self._append_all(parameters)
        if self._pinned:
            torch.cuda.synchronize()  # copies from the GPU do not wait
        return self.message

    @property
    def message(self) -> dict[str, Any]:
        """Arguments of :func:`map_memory` and :func:`read_slots`: ``path``, ``nbytes``, ``layout``."""
        layout = [asdict(slot) for slot in self._slots]
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "nbytes": len(self._memory), "layout": layout}

    def _replace_all(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        slots = iter(self._slots)
        for name, tensor in parameters:
            slot = next(slots, None)
            if slot is None or slot != Slot.for_tensor(name, tensor, slot.offset):
                raise _changed_parameter(Slot.for_tensor(name, tensor), slot)
            slot.view(self._memory).copy_(tensor, non_blocking=self._pinned)
            del tensor  # free it before the next one is gathered
        if (missing := next(slots, None)) is not None:
            raise _changed_parameter(None, missing)

    def _append_all(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        # The total size is unknown: parameters of a sharded role are gathered one at a time.
        self._file = os.memfd_create("lightning_rlhf_weights")
        end = 0
        for name, tensor in parameters:
            slot = Slot.for_tensor(name, tensor, offset=end)
            end = slot.end
            os.truncate(self._file, end)
            self._memory = map_memory(f"/proc/{os.getpid()}/fd/{self._file}", end)
            slot.view(self._memory).copy_(tensor)
            self._slots.append(slot)
            from_gpu = tensor.is_cuda
            del tensor
        if self._slots and from_gpu:
            self._pinned = page_lock(self._memory)

    def first_difference(self, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """Return the name of the first parameter that differs from the last write; None if all are equal."""
        written = {slot.name: slot for slot in self._slots}
        for name, tensor in parameters:
            if name not in written or not torch.equal(written.pop(name).view(self._memory), tensor.cpu()):
                return name
            del tensor
        return next(iter(written), None)

    def close(self) -> None:
        """Unmap and free the memory."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._slots = []
            self._memory = torch.empty(0, dtype=torch.uint8)


def page_lock(memory: Tensor) -> bool:
    """Lock mapped memory, so that a GPU copies to it at the full speed of the bus; return whether this worked."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        log.warning(
            "Weights are pushed through pageable memory, because CUDA could not lock it (error %d).", int(error)
        )
    return not int(error)


def _changed_parameter(new: Slot | None, old: Slot | None) -> RuntimeError:
    return RunError(
        f"the model changed between two pushes: expected {old or 'no more parameters'}, got {new or 'no parameter'}"
    )
