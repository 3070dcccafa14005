"""Transfer of weights to an engine on the same GPUs, through buffers that both processes map (CUDA IPC).

The trainer allocates a buffer on each GPU for each push, and then frees it. It fills the buffers with parameters, the
engine loads them, and so on until all parameters are loaded. An engine on several GPUs shares each of them with one
rank of the trainer, and each of its workers reads the buffer on its GPU. Not tested on a GPU yet: the tests replace
buffers by memory of a CPU, with real engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.rollout.ranks import RankGroup
from lightning_rlhf.rollout.vllm.sync import Slot

BUFFER_BYTES = 256 << 20
_PROBE = torch.arange(251, dtype=torch.uint8).repeat(4)  # first bytes of a new buffer, which the engine compares


def check_ranks(tensor_parallel_size: int, ranks: int) -> None:
    """Validate that an engine on several GPUs shares each of them with one rank.

    Args:
        tensor_parallel_size: number of GPUs of the engine.
        ranks: number of ranks that share the engine.

    Raises:
        ValueError: it does not.
    """
    if tensor_parallel_size > 1 and tensor_parallel_size != ranks:
        raise UsageError(
            f"push_within_gpu needs a rank of the trainer on each GPU of the engine, but tensor_parallel_size is "
            f"{tensor_parallel_size}, and the ranks of this engine are {ranks}: use SharedEngine("
            f"VLLMEngine(tensor_parallel_size={tensor_parallel_size}), ranks={tensor_parallel_size}), or remove "
            f"push_within_gpu, so that weights are pushed through memory of the host"
        )


def push_within_gpu(
    parameters: Iterable[tuple[str, Tensor]],
    version: int,
    execute: Callable[..., None],
    group: RankGroup,
    nbytes: int = BUFFER_BYTES,
) -> str | None:
    """Push all parameters; return the reason, before any is read, if the engine cannot map the buffers.

    Called by all ranks of the group, with the same parameters.

    Args:
        parameters: (name, tensor); each tensor is read before the next one is requested.
        version: version of the policy.
        execute: function that executes a command in the engine's process and waits for its reply; called on the first
            rank.
        group: ranks on the GPUs of the engine.
        nbytes: size of a buffer, which grows to that of the largest parameter.
    """
    with closing(_BufferSender(execute, group, nbytes)) as sender:
        reason = sender.open()
        if reason is None:
            sender.load(parameters)
            group.run_on_first(partial(execute, "finish_parts", version=version))
    return reason


class _BufferSender:
    """The trainer's side of the buffers.

    Args:
        execute: argument of :func:`push_within_gpu`.
        group: argument of :func:`push_within_gpu`.
        nbytes: size of the buffer of this rank; a larger one is allocated for a parameter that needs it.
    """

    def __init__(self, execute: Callable[..., None], group: RankGroup, nbytes: int) -> None:
        self._execute = execute
        self._group = group
        self._nbytes = nbytes
        self._buffer: Tensor | None = None

    def open(self) -> str | None:
        """Allocate the buffers and let the engine map them; return the reason if this does not work."""
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
        self._on_all_ranks(partial(self._fill_new_buffer, nbytes))
        assert self._buffer is not None
        buffers = self._on_all_ranks(partial(exported, self._buffer))  # if all ranks have one: it cannot be taken back
        self._group.run_on_first(partial(self._execute, "open_buffers", buffers=buffers))

    def _fill_new_buffer(self, nbytes: int) -> None:
        self._buffer = None
        self._buffer = allocate(nbytes)
        self._buffer[: len(_PROBE)].copy_(_PROBE)
        wait_for(self._buffer)

    def _on_all_ranks(self, make: Callable[[], Any]) -> list[Any]:
        """Call a function on all ranks; return their results on the first one, or raise the first error on all."""
        result, fault = None, None
        try:
            result = make()
        except RuntimeError as error:  # of CUDA
            fault = str(error)
        answers = self._group.gather((result, fault))
        self._group.run_on_first(partial(_raise_first, [fault for _, fault in answers]))
        return [result for result, _ in answers]

    def _load_part(self, slots: list[Slot], is_first: bool) -> None:
        assert self._buffer is not None
        self._on_all_ranks(partial(wait_for, self._buffer))  # until all buffers are filled
        layout = [asdict(slot) for slot in slots]
        self._group.run_on_first(partial(self._execute, "load_part", layout=layout, is_first=is_first))

    def close(self) -> None:
        """Free the buffer, which the engine does not use any more."""
        self._buffer = None
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _raise_first(faults: Sequence[str | None]) -> None:
    """Raise the first fault of the ranks of an engine, if there is one."""
    for index, fault in enumerate(faults):
        if fault is not None:
            where = f" (rank {index} of the {len(faults)} ranks of the engine)" if len(faults) > 1 else ""
            raise RunError(f"{fault}{where}")


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


def opened(messages: Sequence[dict[str, Any]], device: torch.device) -> Tensor:
    """Map the buffer of another process on this process's GPU.

    Args:
        messages: return values of :func:`exported` of all ranks.
        device: GPU of this process.

    Raises:
        RuntimeError: no buffer is on this GPU.
    """
    here = gpu_identifier(device)
    message = next((message for message in messages if message["gpu"] == here), None)
    if message is None:
        others = ", ".join(message["gpu"] for message in messages)
        raise RunError(f"the trainer's weights are on GPU {others}, the engine on {here}")
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
