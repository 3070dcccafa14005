"""Activations in host memory between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_LEAST_ELEMENTS = 1024  # of a tensor that is worth a copy


@cache
def _stream_of(device: torch.device) -> Any:
    """Return one stream for each device: memory belongs to the stream on which it was allocated."""
    return torch.cuda.Stream(device)


class ActivationOffload(saved_tensors_hooks):
    """Context in which tensors that are saved for the backward pass are copied to page-locked host memory.

    Weights stay where they are, and so do their copies in another dtype, which autocast makes. On a GPU, the copies run
    on a separate stream, beside the forward pass, and back on the same stream when the backward pass asks for them.
    Values do not change.

    Args:
        device: device of the models.
        weights: weights of the model; saved tensors of the same shape are taken for them.
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor]) -> None:
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._device = device
        self._shapes = {shape for weight in weights for shape in (weight.shape, weight.shape[::-1])}
        super().__init__(self._store, self._load)

    def _store(self, tensor: Tensor) -> Any:
        is_activation = type(tensor) is Tensor and tensor.is_floating_point() and tensor.shape not in self._shapes
        if not is_activation or tensor.numel() < _LEAST_ELEMENTS or tensor.device.type != self._device.type:
            return tensor
        if self._stream is None:
            return tensor.detach().to("cpu", copy=True), tensor.device
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not reused before the copy has ended
        return host, tensor.device

    def _load(self, stored: Any) -> Tensor:
        if isinstance(stored, Tensor):
            return stored
        host, device = stored
        if self._stream is None:
            return host.to(device)
        with torch.cuda.stream(self._stream):
            tensor = host.to(device, non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(self._stream)
        tensor.record_stream(current)
        return tensor
