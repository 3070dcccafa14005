"""Transfer of weights to an engine on the same GPU, through a buffer that both processes map (CUDA IPC).

The trainer allocates the buffer for each push, and then frees it. It fills the buffer with parameters, the engine
loads them, and so on until all parameters are loaded. Not tested on a GPU yet: the tests replace the buffer by memory
of a CPU, with a real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.rollout.vllm.sync import Slot

BUFFER_BYTES = 256 << 20
_PROBE = torch.arange(251, dtype=torch.uint8).repeat(4)  # first bytes of a new buffer, which the engine compares


def check_one_gpu(tensor_parallel_size: int) -> None:
    """Validate that the engine is on one GPU.

    Raises:
        ValueError: it is on several.
    """
    if tensor_parallel_size > 1:
        raise UsageError(
            f"push_within_gpu needs an engine on one GPU, got tensor_parallel_size {tensor_parallel_size}: the buffer "
            f"is on the GPU of one rank, and the engine's other GPUs cannot load from it. Remove push_within_gpu, so "
            f"that weights are pushed through memory of the host"
        )


def push_within_gpu(
    parameters: Iterable[tuple[str, Tensor]], version: int, execute: Callable[..., None], nbytes: int = BUFFER_BYTES
) -> str | None:
    """Push all parameters; return the reason, before any is read, if the engine cannot map the buffer.

    Args:
        parameters: (name, tensor); each tensor is read before the next one is requested.
        version: version of the policy.
        execute: function that executes a command in the engine's process and waits for its reply.
        nbytes: size of the buffer, which grows to that of the largest parameter.
    """
    with closing(_BufferSender(execute, nbytes)) as sender:
        reason = sender.open()
        if reason is None:
            sender.load(parameters)
            execute("finish_parts", version=version)
    return reason


class _BufferSender:
    """The trainer's side of the buffer.

    Args:
        execute: function that executes a command in the engine's process and waits for its reply.
        nbytes: size of the buffer; a larger one is allocated for a parameter that needs it.
    """

    def __init__(self, execute: Callable[..., None], nbytes: int) -> None:
        self._execute = execute
        self._nbytes = nbytes
        self._buffer: Tensor | None = None

    def open(self) -> str | None:
        """Allocate the buffer and let the engine map it; return the reason if this does not work."""
        try:
            self._allocate(self._nbytes)
        except RuntimeError as error:  # of CUDA, or of the engine
            self.close()
            return str(error)
        return None

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Let the engine load all parameters."""
        assert self._buffer is not None
        slots: list[Slot] = []
        is_first = True
        for name, tensor in parameters:
            slot = Slot.for_tensor(name, tensor, slots[-1].end if slots else 0)
            if slots and slot.end > len(self._buffer):
                self._load_part(slots, is_first)
                slots, is_first = [], False
                slot = replace(slot, offset=0)
            if slot.end > len(self._buffer):
                self._allocate(slot.end)
            slot.view(self._buffer).copy_(tensor)
            slots.append(slot)
            del tensor  # free it before the next one is gathered
        self._load_part(slots, is_first)

    def _allocate(self, nbytes: int) -> None:
        self._buffer = None
        self._buffer = allocate(nbytes)
        self._buffer[: len(_PROBE)].copy_(_PROBE)
        wait_for(self._buffer)
        self._execute("open_buffer", buffer=exported(self._buffer))

    def _load_part(self, slots: list[Slot], is_first: bool) -> None:
        assert self._buffer is not None
        wait_for(self._buffer)
        self._execute("load_part", layout=[asdict(slot) for slot in slots], is_first=is_first)

    def close(self) -> None:
        """Free the buffer, which the engine does not use any more."""
        self._buffer = None
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def allocate(nbytes: int) -> Tensor:
    """Return a new buffer on the current GPU."""
    return torch.empty(max(nbytes, len(_PROBE)), dtype=torch.uint8, device="cuda")


def wait_for(buffer: Tensor) -> None:
    """Wait until the GPU has finished all copies to and from a buffer."""
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def exported(buffer: Tensor) -> dict[str, Any]:
    """Return the message with which another process maps a buffer once.

    The message has the arguments of :func:`torch.multiprocessing.reductions.rebuild_cuda_tensor` that differ between
    buffers, and the identifier of the GPU.
    """
    _, arguments = reduce_tensor(buffer)
    _, handle, size, offset, _, ref_handle, ref_offset, event_handle, waits_for_event = arguments[6:]
    return {
        "gpu": gpu_identifier(buffer.device),
        "nbytes": len(buffer),
        "tensor_offset": arguments[3],
        "handle": handle.hex(),
        "storage_bytes": size,
        "storage_offset": offset,
        "ref_counter_handle": ref_handle.hex(),
        "ref_counter_offset": ref_offset,
        "event_handle": event_handle.hex(),
        "waits_for_event": waits_for_event,
    }


def opened(message: dict[str, Any], device: torch.device) -> Tensor:
    """Map the buffer of another process.

    Args:
        message: return value of :func:`exported`.
        device: GPU of this process.

    Raises:
        RuntimeError: the buffer is on another GPU.
    """
    if message["gpu"] != gpu_identifier(device):
        raise RunError(f"the trainer's weights are on GPU {message['gpu']}, the engine on {gpu_identifier(device)}")
    return rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([message["nbytes"]]),
        tensor_stride=(1,),
        tensor_offset=message["tensor_offset"],
        storage_cls=torch.UntypedStorage,
        dtype=torch.uint8,
        storage_device=device.index or 0,
        storage_handle=bytes.fromhex(message["handle"]),
        storage_size_bytes=message["storage_bytes"],
        storage_offset_bytes=message["storage_offset"],
        requires_grad=False,
        ref_counter_handle=bytes.fromhex(message["ref_counter_handle"]),
        ref_counter_offset=message["ref_counter_offset"],
        event_handle=bytes.fromhex(message["event_handle"]),
        event_sync_required=message["waits_for_event"],
    )


def check_probe(buffer: Tensor) -> None:
    """Validate that a mapped buffer has the bytes that the trainer has written.

    Raises:
        RuntimeError: it has others.
    """
    if not torch.equal(buffer[: len(_PROBE)].cpu(), _PROBE):
        raise RunError("the buffer of the trainer has other bytes in the engine's process")


def gpu_identifier(device: torch.device) -> str:
    """Return the identifier of a GPU, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)
