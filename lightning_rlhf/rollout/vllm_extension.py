"""What vLLM's worker runs to take new weights; vLLM imports it by name."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rlhf.rollout.weight_sync import map_memory, read_slots

_PROBES = 64  # a copy of old weights differs in every column


class WeightReceiver:
    """Methods added to vLLM's worker class."""

    model_runner: Any
    reload_weights: Any  # vLLM's own, which makes its configuration the current one for kernels that read it
    _memory: Tensor | None = None

    def receive_weights(self, path: str, nbytes: int, layout: list[dict[str, Any]]) -> None:
        """Load all parameters from shared memory, packed copies included."""
        if self._memory is None or len(self._memory) != nbytes:
            self._memory = map_memory(path, nbytes)
        self.reload_weights(weights_iterator=read_slots(self._memory, layout))
        repack(self.model_runner.model)

    def trace_weights(self, path: str, nbytes: int, layout: list[dict[str, Any]]) -> list[int]:
        """Load all parameters again and see how much of them is taken.

        Returns:
            How many elements of each parameter arrived.
        """
        assert self._memory is not None
        trace = _Trace(self.model_runner.model, self._memory, [slot["offset"] for slot in layout])
        with trace:
            self.receive_weights(path, nbytes, layout)
        return trace.counts()


class _Trace(TorchDispatchMode):
    """Sees which elements of the shared memory are read while weights are loaded, and into which packed layers.

    Args:
        model: of vLLM.
        memory: shared with the trainer.
        offsets: where the parameters begin in it, in bytes, ascending.
    """

    def __init__(self, model: nn.Module, memory: Tensor, offsets: list[int]) -> None:
        super().__init__()
        self._memory, self._offsets = memory, offsets
        self._packed: list[Any] = [module for module in model.modules() if hasattr(module, "cpu_linear")]
        self._filled: list[tuple[Any, int, int, Tensor]] = []  # layer, its first row that was filled, parameter, value
        self._read: list[dict[Any, int]] = [{} for _ in offsets]  # the elements of each piece, once however often read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it reads."""
        result = func(*args, **(kwargs or {}))
        if self._computes(func, result):
            for source in tree_leaves((args, kwargs)):
                if isinstance(source, Tensor) and _same_storage(source, self._memory):
                    number = bisect_right(self._offsets, source.data_ptr() - self._memory.data_ptr()) - 1
                    piece = source.data_ptr(), source.shape, source.stride()
                    self._read[number][piece] = source.numel()
                    if func is torch.ops.aten.copy_.default:
                        self._note_layer(args[0], number, source)
        return result

    def _computes(self, func: Any, result: Any) -> bool:
        """Whether an operation looks at values: it makes no view, no tensor of the same shape, none without data."""
        # Before vLLM loads into a layer, it loads into a copy of it that has no data, in order to count.
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = func.name()
        return not (
            name.partition(".")[0].endswith("_like")
            or name.startswith("aten::new_")
            or any(tensor.is_meta or _same_storage(tensor, self._memory) for tensor in tensors)
        )

    def _note_layer(self, target: Tensor, number: int, source: Tensor) -> None:
        for layer in self._packed:
            if source.ndim == 2 and _same_storage(layer.weight, target):
                row = target.storage_offset() // target.shape[1]
                self._filled.append((layer, row, number, source.to(target.dtype)))

    def counts(self) -> list[int]:
        """Elements that were read of each parameter; 0 where a layer on a CPU computes with another, packed copy."""
        read = [sum(pieces.values()) for pieces in self._read]
        for owner, row, number, weight in self._filled:
            for layer in self._packed:
                tied = layer.weight.numel() > 0 and _same_storage(layer.weight, owner.weight)
                if (layer is owner or tied) and not _multiplies_by(layer, row, weight):
                    read[number] = 0
        return read


def _same_storage(left: Tensor, right: Tensor) -> bool:
    return left.device == right.device and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def _multiplies_by(layer: Any, row: int, weight: Tensor) -> bool:
    """Whether a layer computes with the weight, from a row on: unit vectors bring out some columns bit by bit."""
    width = weight.shape[1]
    columns = torch.linspace(0, width - 1, min(width, _PROBES)).long()
    found = layer.cpu_linear(nn.functional.one_hot(columns, width).to(weight.dtype), layer.weight, None)
    return torch.equal(found[:, row : row + len(weight)].T, weight[:, columns])


def repack(model: nn.Module) -> None:
    """Pack anew what vLLM 0.32 on a CPU leaves as it was loaded, or as it was before."""
    repack_tied_head(model)
    repack_experts(model)


def repack_tied_head(model: nn.Module) -> None:
    """Pack a head that is tied to the embedding anew: on CPUs vLLM 0.32 keeps the packed copy of the old weights."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and getattr(module, "cpu_linear", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def repack_experts(model: nn.Module) -> None:
    """Pack experts in the order in which they are multiplied: on CPUs vLLM 0.32 does so for the first weights only."""
    method: Any
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if layer_is_on_cpu(layer) and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def layer_is_on_cpu(layer: Any) -> bool:
    """Whether it holds experts in the CPU's memory."""
    weight = getattr(layer, "w13_weight", None)
    return isinstance(weight, Tensor) and weight.device.type == "cpu"
