"""Activations in host memory between the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_LEAST_ELEMENTS = 1024  # of a tensor that is worth a copy


class ActivationOffload(saved_tensors_hooks):
    """Context in which tensors that are saved for the backward pass are copied to page-locked host memory.

    Weights stay where they are, and so do their copies in another dtype, which autocast makes. Values do not change.
    As in torch's ``save_on_cpu``, the copies run between the kernels of the forward and the backward pass, not beside
    them: so the GPU's memory of a tensor is free when the next kernel begins, however far the host is ahead.

    Args:
        device: device of the models.
        weights: weights of the model; saved tensors of the same shape are taken for them.
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor]) -> None:
        self._device, self._locks = device, device.type == "cuda"
        self._shapes = {shape for weight in weights for shape in (weight.shape, weight.shape[::-1])}
        super().__init__(self._store, self._load)

    def _store(self, tensor: Tensor) -> Any:
        is_activation = type(tensor) is Tensor and tensor.is_floating_point() and tensor.shape not in self._shapes
        if not is_activation or tensor.numel() < _LEAST_ELEMENTS or tensor.device.type != self._device.type:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._locks)
        host.copy_(tensor.detach(), non_blocking=self._locks)
        return host, tensor.device

    def _load(self, stored: Any) -> Tensor:
        if isinstance(stored, Tensor):
            return stored
        host, device = stored
        return host.to(device, non_blocking=self._locks, copy=True)
